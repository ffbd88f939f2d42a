from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from prefixcache import limits
from prefixcache.errors import ConfigError
from prefixcache.rendering import tokenizer_files
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from tests.support.tiny_tokenizer import tiny_tokenizer_files, write_files


def test_a_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    files = tiny_tokenizer_files()
    (tmp_path / "config.json").write_text("{}")
    read = TokenizerFiles.from_folder(write_files(files, tmp_path))
    assert dict(read.files) == dict(files.files)
    assert read.fingerprint == files.fingerprint


def test_fingerprint_frames_names_and_bytes() -> None:
    files = TokenizerFiles(files={"tokenizer_config.json": b"ab", "tokenizer.json": b""})
    expected = (
        (14).to_bytes(4, "little") + b"tokenizer.json" + (0).to_bytes(4, "little")
        + (21).to_bytes(4, "little") + b"tokenizer_config.json" + (2).to_bytes(4, "little") + b"ab"
    )  # fmt: skip
    assert files.fingerprint == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_every_file_enters_the_fingerprint(name: str) -> None:
    files = tiny_tokenizer_files()
    changed = TokenizerFiles(files={**files.files, name: files.files[name] + b" "})
    assert changed.fingerprint != files.fingerprint


def test_files_cannot_be_changed_afterwards() -> None:
    given = {"tokenizer.json": b"{}"}
    files = TokenizerFiles(files=given)
    given["tokenizer.json"] = b"other"
    assert files.files["tokenizer.json"] == b"{}"
    with pytest.raises(TypeError):
        files.files["tokenizer.json"] = b""  # type: ignore[index]  # the mapping is read-only: that is the test


def test_missing_tokenizer_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*tokenizer\.json"):
        TokenizerFiles.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="missing-folder"):
        TokenizerFiles.from_folder(tmp_path / "missing-folder")
    with pytest.raises(ConfigError, match=r"lack tokenizer\.json"):
        TokenizerFiles(files={})


def test_foreign_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="passwd"):
        TokenizerFiles(files={"tokenizer.json": b"{}", "../../etc/passwd": b""})


def test_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_files(tiny_tokenizer_files(), tmp_path)
    monkeypatch.setattr(tokenizer_files, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(ConfigError, match=rf"{tmp_path}.*over the limit of 100"):
        TokenizerFiles.from_folder(folder)
    with pytest.raises(ConfigError, match="over the limit of 100"):
        TokenizerFiles(files={"tokenizer.json": bytes(101)})
    assert limits.MAX_TOKENIZER_BYTES == 64 * 1024 * 1024
