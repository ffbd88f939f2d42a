"""Installs torch for what it is to run on, and makes sure that it is that build.

    python install_torch.py --backend cpu|cuda|cuNNN --environment FOLDER torch==VERSION [-- PIP ARGUMENTS]

PyPI's torch for Linux brings CUDA libraries of several GB, which a CPU never uses. Which build a machine gets by
default depends on its index, so pip is asked first what it would take. Where that is the wrong one, uv takes the right
one: it knows where the builds for each backend are. PIP ARGUMENTS (PIP_TORCH_ARGS of the build) go before all that.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

_CUDA_PACKAGE = re.compile(r"(nvidia|cuda|pytorch[-_]triton|triton)([-_].*)?", re.IGNORECASE)
_BACKEND = re.compile(r"cpu|cuda|cu\d{3}")
_UV = "uv>=0.8,<1"


class WrongBuild(Exception):
    """What was installed, and the mend."""


def brings_cuda(packages: Iterable[str]) -> bool:
    return any(_CUDA_PACKAGE.fullmatch(name) for name in packages)


def packages_in(report: Any) -> list[str]:
    """Names in pip's installation report."""
    return [entry["metadata"]["name"] for entry in report["install"]]


def install_command(backend: str, requirement: str, *, environment: Path, given: list[str], cuda: bool) -> list[str]:
    """`cuda`: pip, left to itself, takes a build for CUDA. Raises WrongBuild where nothing says which one to take."""
    python = [sys.executable, "-m"]
    if given:
        return [*python, "pip", "--python", str(environment), "install", *given, requirement]
    if (backend == "cpu" and not cuda) or (backend == "cuda" and cuda):
        return [*python, "pip", "--python", str(environment), "install", requirement]
    if backend == "cuda":  # uv would look for a GPU on the machine that builds
        raise WrongBuild("pip's source has a torch without CUDA; name one by its number, such as cu128, as the backend")
    target = ["--python", str(environment / "bin" / "python")]
    return [*python, "uv", "pip", "install", *target, "--torch-backend", backend, requirement]


def check_build(backend: str, cuda_version: str | None, packages: Iterable[str]) -> None:
    """Raises WrongBuild. `cuda_version` is what torch/version.py says."""
    mend = "name pip's source in PIP_TORCH_ARGS, for example \"--index-url URL\" with the one that PyTorch's page names"
    if backend == "cpu" and (cuda_version is not None or brings_cuda(packages)):
        raise WrongBuild(f"a torch for CPUs was wanted, and one for CUDA {cuda_version} came; {mend}")
    if backend != "cpu" and cuda_version is None:
        raise WrongBuild(f"a torch for {backend} was wanted, and one without CUDA came; {mend}")
    if backend.startswith("cu") and backend != "cuda" and cuda_version is not None:
        if cuda_version.replace(".", "") != backend.removeprefix("cu"):
            raise WrongBuild(f"a torch for {backend} was wanted, and one for CUDA {cuda_version} came; {mend}")


def cuda_version(site_packages: Path) -> str | None:
    """Read rather than imported: a torch for CUDA cannot always be loaded where it is installed."""
    text = (site_packages / "torch" / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _would_take(requirement: str) -> list[str]:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run([*command, "--report", "-", requirement], stdout=subprocess.PIPE, check=True)
    return packages_in(json.loads(done.stdout))


def _run(command: list[str]) -> None:
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True)


def main(arguments: list[str]) -> None:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, given = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--environment", required=True, type=Path)
    parser.add_argument("requirement")
    asked = parser.parse_args(own)
    if not _BACKEND.fullmatch(asked.backend):
        parser.error(f"--backend is {asked.backend!r}, not cpu, cuda or one like cu128")
    cuda = not given and brings_cuda(_would_take(asked.requirement))
    command = install_command(asked.backend, asked.requirement, environment=asked.environment, given=given, cuda=cuda)
    if "uv" in command:
        _run([sys.executable, "-m", "pip", "install", _UV])
    _run(command)
    (site_packages,) = asked.environment.glob("lib/python3.*/site-packages")
    names = [found.metadata["Name"] for found in distributions(path=[str(site_packages)])]
    check_build(asked.backend, cuda_version(site_packages), names)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (WrongBuild, subprocess.CalledProcessError) as error:
        raise SystemExit(f"error: {error}") from None
