"""The API keys: read, checked, and their number told at the start. Nobody is let in because a setting was mistaken."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from prefixcache.errors import ConfigError

_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")
_HOW = "API_KEYS_FILE (or API_KEYS) sets them, .env.example says how"


def read_keys(listed: str, path: str) -> tuple[str, ...]:
    """Of API_KEYS and API_KEYS_FILE; none if neither is given. Raises ConfigError, without a key in its text.

    A file that is /dev/null, by whatever name, is none: so containers have it where no other one is mounted.
    """
    keys = _split(listed)
    if listed and not keys:
        raise ConfigError("API_KEYS holds no key, only blanks and commas; leave it empty to serve everybody")
    if path and not _is_null(path):
        from_file = _split(_text(path))
        if not from_file:
            raise ConfigError(f"API_KEYS_FILE: {path} holds no key; leave the variable empty to serve everybody")
        keys += from_file
    for place, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"API key {place} of {len(keys)} has {len(key)} characters; "
                "a key is 16 to 256 of the letters, the digits and ._~+/=-"
            )
    return tuple(dict.fromkeys(keys))


def told(keys: Sequence[str], published: str) -> tuple[int, str]:
    """What to log at the start, and how loud; `published`: the address on which clients find the edge."""
    if keys:
        return logging.INFO, f"{len(keys)} API {'key' if len(keys) == 1 else 'keys'}: who shows none is told 401"
    if _is_loopback(published):
        return logging.INFO, f"no API key: everybody on this machine is served; {_HOW}"
    return logging.WARNING, f"no API key: everybody who reaches {published} is served; {_HOW}"


def _split(text: str) -> list[str]:
    return [key for key in re.split(r"[,\s]+", text) if key]


def _text(path: str) -> str:
    if Path(path).is_dir():
        raise ConfigError(
            f"API_KEYS_FILE: {path} is a folder. Docker makes one where the file that it should mount is missing: "
            "remove the folder, write the file, and start again"
        )
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"API_KEYS_FILE: {path} cannot be read: {error}") from None


def _is_null(path: str) -> bool:
    """By its device: one that is mounted into a container has another inode."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
