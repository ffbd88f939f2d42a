"""Writes requirements.lock and requirements-dev.lock from what pip resolves in two fresh environments."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD_TOOLS = "setuptools"
"""The editable install builds without isolation, so that nothing unpinned is fetched."""


def _resolved(scratch: Path, name: str, requirements: list[str]) -> list[str]:
    """`name==version` of all that an environment with these requirements holds."""
    environment = scratch / name
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *requirements], check=True)
    frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    lines = (line.partition("+")[0] for line in frozen.splitlines() if "==" in line)
    return sorted(line for line in lines if not line.startswith("pip=="))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="the pin of torch, for example torch==2.13.0")
    torch = parser.parse_args().torch
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [torch, BUILD_TOOLS, *project["dependencies"]]
    with tempfile.TemporaryDirectory() as folder:
        run = _resolved(Path(folder), "run", needed)
        develop = _resolved(Path(folder), "develop", [*needed, *project["optional-dependencies"]["dev"]])
    header = "# Written by `make lock` from pyproject.toml.\n"
    (ROOT / "requirements.lock").write_text(header + "\n".join(run) + "\n")
    extra = [line for line in develop if line not in run]
    (ROOT / "requirements-dev.lock").write_text(header + "\n".join(extra) + "\n")


if __name__ == "__main__":
    main()
