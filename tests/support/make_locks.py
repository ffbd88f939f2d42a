"""Writes the three lock files from what pip resolves in two fresh environments."""

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

CONDITIONAL = {"async-timeout": 'python_full_version < "3.11.3"'}
"""Locked whichever Python writes the locks, for those that redis needs it on: Debian 12 has 3.11.2."""


def _resolved(scratch: Path, name: str, requirements: list[str]) -> list[str]:
    """`name==version` of all that an environment with these requirements holds."""
    environment = scratch / name
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *requirements], check=True)
    frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    lines = (line.partition("+")[0] for line in frozen.splitlines() if "==" in line)
    return sorted(_with_condition(line) for line in lines if not line.startswith("pip=="))


def _with_condition(line: str) -> str:
    condition = CONDITIONAL.get(line.partition("==")[0])
    return f"{line}; {condition}" if condition else line


def _of_the_proxy(environment: Path, run: list[str]) -> list[str]:
    """The lines of `run` that the proxy's image installs, found out where they are installed."""
    command = [str(environment / "bin" / "python"), str(ROOT / "tests" / "support" / "proxy_packages.py")]
    return subprocess.run(command, input="\n".join(run), check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="the pin of torch, for example torch==2.13.0")
    torch = parser.parse_args().torch
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [torch, BUILD_TOOLS, *CONDITIONAL, *project["dependencies"]]
    with tempfile.TemporaryDirectory() as folder:
        run = _resolved(Path(folder), "run", needed)
        proxy = _of_the_proxy(Path(folder) / "run", run)
        develop = _resolved(Path(folder), "develop", [*needed, *project["optional-dependencies"]["dev"]])
    header = "# Written by `make lock` from pyproject.toml.\n"
    (ROOT / "requirements.lock").write_text(header + "\n".join(run) + "\n")
    (ROOT / "requirements-proxy.lock").write_text(header + "\n".join(proxy) + "\n")
    extra = [line for line in develop if line not in run]
    (ROOT / "requirements-dev.lock").write_text(header + "\n".join(extra) + "\n")


if __name__ == "__main__":
    main()
