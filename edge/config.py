"""What the edge is told, all of it by the environment.

EDGE_PROXIES         names of the proxies, HOST:PORT with commas between; a name may have many addresses
EDGE_LISTEN          HOST:PORT, 0.0.0.0:8000 if absent
EDGE_METRICS_LISTEN  HOST:PORT of its own metrics, which nobody outside should reach; none if absent
EDGE_RUN_DIR         folder for its configuration and process id, /run/edge if absent
EDGE_TMP_DIR         folder for large bodies while they come in, /tmp if absent
EDGE_PROCESSES       processes of nginx, 2 if absent
EDGE_NGINX           the program, `nginx` if absent
API_KEYS             keys with commas between, one of which a client must show; none: everybody is served
API_KEYS_FILE        a file with further ones, one a line or with commas between; need not exist
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prefixcache.errors import ConfigError

_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")
_LISTEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z.*-]+):(\d{1,5})")
_FOLDER = re.compile(r"/[A-Za-z0-9._/-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """What is resolved again and again."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    proxies: tuple[Name, ...]
    listen: str
    run_dir: Path
    tmp_dir: Path
    num_processes: int
    nginx: str
    metrics_listen: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)


def read_config(environment: Mapping[str, str]) -> EdgeConfig:
    """Raises ConfigError, without a key in its text."""
    processes = environment.get("EDGE_PROCESSES", "") or "2"
    if not processes.isdecimal() or not 1 <= int(processes) <= 64:
        raise ConfigError(f"EDGE_PROCESSES is {processes!r}, not a number from 1 to 64")
    return EdgeConfig(
        proxies=_names(environment.get("EDGE_PROXIES", "")),
        listen=_listen("EDGE_LISTEN", environment.get("EDGE_LISTEN", "") or "0.0.0.0:8000"),
        run_dir=_folder(environment, "EDGE_RUN_DIR", "/run/edge"),
        tmp_dir=_folder(environment, "EDGE_TMP_DIR", "/tmp"),
        num_processes=int(processes),
        nginx=environment.get("EDGE_NGINX", "") or "nginx",
        metrics_listen=_listen("EDGE_METRICS_LISTEN", environment.get("EDGE_METRICS_LISTEN", "")) or None,
        api_keys=_keys(environment.get("API_KEYS", ""), environment.get("API_KEYS_FILE", "")),
    )


def _listen(name: str, text: str) -> str:
    if text and not _LISTEN.fullmatch(text):
        raise ConfigError(f"{name} is {text!r}, not HOST:PORT")
    return text


def _names(text: str) -> tuple[Name, ...]:
    names = []
    for part in filter(None, map(str.strip, text.split(","))):
        host, _, port = part.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError(f"EDGE_PROXIES: {part!r} is not HOST:PORT")
        names.append(Name(host=host.strip("[]"), port=int(port)))
    if not names:
        raise ConfigError("EDGE_PROXIES is empty: it names the proxies, for example proxy:8000")
    return tuple(names)


def _folder(environment: Mapping[str, str], name: str, default: str) -> Path:
    """These paths stand in a file of nginx, where blanks, quotes and semicolons have a meaning."""
    text = environment.get(name, "") or default
    if not _FOLDER.fullmatch(text):
        raise ConfigError(f"{name} is {text!r}, not an absolute path of letters, digits and ._-")
    return Path(text)


def _keys(listed: str, path: str) -> tuple[str, ...]:
    try:
        from_file = Path(path).read_text(encoding="utf-8") if path and Path(path).exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"API_KEYS_FILE: {path} cannot be read: {error}") from None
    keys = [key for key in re.split(r"[,\s]+", f"{listed},{from_file}") if key]
    for place, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"API key {place} of {len(keys)} has {len(key)} characters; "
                "a key is 16 to 256 of the letters, the digits and ._~+/=-"
            )
    return tuple(dict.fromkeys(keys))
