"""What the edge is told, all of it by the environment.

EDGE_PROXIES         names of the proxies, HOST:PORT with commas between; a name may have many addresses, each of one
                     proxy: behind an address that several share, each change of who answers is a proxy lost
EDGE_LISTEN          HOST:PORT, 0.0.0.0:8000 if absent
EDGE_PUBLISHED       address on which clients find it, for its word on keys; that of EDGE_LISTEN if absent
EDGE_METRICS_LISTEN  HOST:PORT of its own metrics, which nobody outside should reach; none if absent
EDGE_CLIENTS         requests that it has in hand at once, 4096 if absent
EDGE_RUN_DIR         folder for its configuration and process id, /run/edge if absent
EDGE_TMP_DIR         folder for bodies over 16 KiB until their answers begin, /tmp if absent
EDGE_PROCESSES       processes of nginx, 2 if absent
EDGE_NGINX           the program, `nginx` if absent
API_KEYS             keys with commas between, one of which a client must show; none: everybody is served
API_KEYS_FILE        a file with further ones, one a line or with commas between; none: /dev/null, or absent
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge.api_keys import read_keys
from prefixcache.errors import ConfigError
from prefixcache.limits import EDGE_CLIENTS

_LISTEN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z.*-]+):(\d{1,5})")
_FOLDER = re.compile(r"/[A-Za-z0-9._/-]*")
_MOST_CLIENTS = 65_535
"""nginx counts them in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """What is resolved again and again."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    proxies: tuple[Name, ...]
    listen: str
    published: str
    run_dir: Path
    tmp_dir: Path
    num_processes: int
    num_clients: int
    nginx: str
    metrics_listen: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)


def read_config(environment: Mapping[str, str]) -> EdgeConfig:
    """Raises ConfigError, without a key in its text."""
    listen = _listen("EDGE_LISTEN", environment.get("EDGE_LISTEN", "") or "0.0.0.0:8000")
    return EdgeConfig(
        proxies=_names(environment.get("EDGE_PROXIES", "")),
        listen=listen,
        published=environment.get("EDGE_PUBLISHED", "") or listen.rpartition(":")[0],
        run_dir=_folder(environment, "EDGE_RUN_DIR", "/run/edge"),
        tmp_dir=_folder(environment, "EDGE_TMP_DIR", "/tmp"),
        num_processes=_number(environment, "EDGE_PROCESSES", default=2, most=64),
        num_clients=_number(environment, "EDGE_CLIENTS", default=EDGE_CLIENTS, most=_MOST_CLIENTS),
        nginx=environment.get("EDGE_NGINX", "") or "nginx",
        metrics_listen=_listen("EDGE_METRICS_LISTEN", environment.get("EDGE_METRICS_LISTEN", "")) or None,
        api_keys=read_keys(environment.get("API_KEYS", ""), environment.get("API_KEYS_FILE", "")),
    )


def _number(environment: Mapping[str, str], name: str, *, default: int, most: int) -> int:
    text = environment.get(name, "") or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"{name} is {text!r}, not a number from 1 to {most}")
    return int(text)


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
