"""API keys: what is taken, what is refused and how, that nobody is let in by mistake, and that no key is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from edge.api_keys import read_keys, told
from prefixcache.errors import ConfigError

KEY = "0123456789abcdef"
NO_FILE = "/dev/null"


def test_from_both_places_each_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}1\n\n {KEY}2,{KEY}\n")
    assert read_keys(f" {KEY} ,,{KEY}3", str(file)) == (KEY, f"{KEY}3", f"{KEY}1", f"{KEY}2")


def test_a_file_as_windows_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"\ufeff{KEY}\r\n{KEY}2\r\n".encode())
    assert read_keys("", str(file)) == (KEY, f"{KEY}2")


def test_none_where_none_is_meant(tmp_path: Path) -> None:
    assert read_keys("", "") == read_keys("", NO_FILE) == ()
    link = tmp_path / "keys"
    link.symlink_to(NO_FILE)
    assert read_keys("", str(link)) == (), "the compose file mounts it there by another name"
    assert read_keys(KEY, NO_FILE) == (KEY,)


@pytest.mark.parametrize("listed", [" ", ",", " , ,\t\n"])
def test_a_list_that_holds_none_lets_nobody_in(listed: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="API_KEYS holds no key"):
        read_keys(listed, NO_FILE)
    file = tmp_path / "keys"
    file.write_text(KEY)
    with pytest.raises(ConfigError, match="API_KEYS holds no key"):
        read_keys(listed, str(file))


@pytest.mark.parametrize("content", ["", "\n", "\ufeff\r\n"])
def test_a_file_that_holds_none_lets_nobody_in(content: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    for listed in ("", KEY):
        with pytest.raises(ConfigError, match=rf"API_KEYS_FILE: {file} holds no key"):
            read_keys(listed, str(file))


def test_nor_does_one_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"API_KEYS_FILE: .*absent cannot be read: .*No such file"):
        read_keys("", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"API_KEYS_FILE: .* is a folder. Docker makes one where the file"):
        read_keys("", str(tmp_path))
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys("", str(file))


@pytest.mark.parametrize(
    "wrong", ["short-secret", "with{brace}0123456", 'quote"0123456789', "$variable0123456", "x" * 257]
)
def test_a_key_of_another_form_is_refused_without_being_told(wrong: str) -> None:
    with pytest.raises(ConfigError, match="API key 2 of 2 has") as raised:
        read_keys(f"{KEY},{wrong}", NO_FILE)
    assert wrong not in str(raised.value) and KEY not in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "published", "level", "words"),
    [
        ((KEY,), "0.0.0.0", logging.INFO, "1 API key: who shows none"),
        ((KEY, KEY + "2"), "127.0.0.1", logging.INFO, "2 API keys: "),
        ((), "127.0.0.1", logging.INFO, "no API key: everybody on this machine is served; API_KEYS_FILE"),
        ((), "[::1]", logging.INFO, "no API key: everybody on this machine"),
        ((), "localhost", logging.INFO, "no API key: everybody on this machine"),
        ((), "0.0.0.0", logging.WARNING, "no API key: everybody who reaches 0.0.0.0 is served; API_KEYS_FILE"),
        ((), "10.0.0.7", logging.WARNING, "everybody who reaches 10.0.0.7"),
        ((), "a.host", logging.WARNING, "everybody who reaches a.host"),
    ],
)
def test_what_is_told_at_the_start(keys: tuple[str, ...], published: str, level: int, words: str) -> None:
    said = told(keys, published)
    assert said[0] == level and words in said[1] and KEY not in said[1]
