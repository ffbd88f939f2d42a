"""Which torch an image gets: what is run for each wish, and what is refused afterwards.

That uv brings the CPU builds where pip would bring CUDA is not tried here: this suite's index has one build alone.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ENVIRONMENT = Path("/opt/x")


def load() -> ModuleType:
    """A script beside the Dockerfiles, no module of a package."""
    path = Path(__file__).resolve().parents[2] / "deploy" / "install_torch.py"
    spec = importlib.util.spec_from_file_location("install_torch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()
PIP = [sys.executable, "-m", "pip", "--python", "/opt/x", "install"]


def command(backend: str, *, given: list[str] | None = None, cuda: bool) -> list[str]:
    words: list[str] = script.install_command(
        backend, "torch==1.0", environment=ENVIRONMENT, given=given or [], cuda=cuda
    )
    return words


def test_pip_does_it_where_its_build_is_the_one_that_is_wanted() -> None:
    assert command("cpu", cuda=False) == [*PIP, "torch==1.0"]
    assert command("cuda", cuda=True) == [*PIP, "torch==1.0"]


@pytest.mark.parametrize(("backend", "cuda"), [("cpu", True), ("cu128", True), ("cu128", False)])
def test_uv_does_it_where_pip_has_another_one(backend: str, cuda: bool) -> None:
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", "/opt/x/bin/python"]
    assert command(backend, cuda=cuda) == [*uv, "--torch-backend", backend, "torch==1.0"]


def test_any_cuda_is_not_guessed() -> None:
    with pytest.raises(script.WrongBuild, match="cu128"):
        command("cuda", cuda=False)


def test_arguments_that_are_given_decide() -> None:
    assert command("cpu", given=["--index-url", "URL"], cuda=True) == [*PIP, "--index-url", "URL", "torch==1.0"]


@pytest.mark.parametrize(
    ("packages", "brings"),
    [
        (["torch", "numpy", "sympy"], False),
        (["torch", "nvidia-cublas-cu12"], True),
        (["triton"], True),
        (["cuda-bindings"], True),
        (["tritonclient", "cudatext"], False),
    ],
)
def test_cuda_is_known_by_its_packages(packages: list[str], brings: bool) -> None:
    report = {"install": [{"metadata": {"name": name}} for name in packages]}
    assert script.brings_cuda(script.packages_in(report)) is brings


@pytest.mark.parametrize(("backend", "cuda"), [("cpu", None), ("cuda", "12.8"), ("cu128", "12.8")])
def test_the_right_build_passes(backend: str, cuda: str | None) -> None:
    script.check_build(backend, cuda, ["torch"])


@pytest.mark.parametrize(
    ("backend", "cuda", "packages"),
    [("cpu", "12.8", []), ("cpu", None, ["nvidia-nccl-cu12"]), ("cuda", None, []), ("cu128", "12.6", [])],
)
def test_another_build_is_refused_with_the_mend(backend: str, cuda: str | None, packages: list[str]) -> None:
    with pytest.raises(script.WrongBuild, match="PIP_TORCH_ARGS"):
        script.check_build(backend, cuda, ["torch", *packages])


@pytest.mark.parametrize(
    ("line", "version"), [("cuda: Optional[str] = '12.8'", "12.8"), ("cuda: Optional[str] = None", None), ("", None)]
)
def test_the_build_is_read_from_its_version_file(line: str, version: str | None, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.0+x'\ndebug = False\n{line}\nhip = None\n")
    assert script.cuda_version(tmp_path) == version


@pytest.mark.parametrize("backend", ["gpu", "cu12", ""])
def test_a_backend_that_is_none_is_refused(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--backend", backend, "--environment", "/opt/x", "torch==1.0", "--"])
    assert "not cpu, cuda or one like cu128" in capsys.readouterr().err
