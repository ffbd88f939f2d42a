"""The environment of the edge: what is taken, what is refused and how, and that no key is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.config import EdgeConfig, Name, read_config
from prefixcache.errors import ConfigError
from prefixcache.limits import EDGE_CLIENTS

KEY = "0123456789abcdef"


def read(**environment: str) -> EdgeConfig:
    return read_config({"EDGE_PROXIES": "proxy:8000", **environment})


def test_defaults() -> None:
    assert read(API_KEYS="", API_KEYS_FILE="", EDGE_LISTEN="") == EdgeConfig(
        proxies=(Name(host="proxy", port=8000),),
        listen="0.0.0.0:8000",
        published="0.0.0.0",
        run_dir=Path("/run/edge"),
        tmp_dir=Path("/tmp"),
        num_processes=2,
        num_clients=EDGE_CLIENTS,
        nginx="nginx",
        api_keys=(),
    )


def test_several_names_and_addresses() -> None:
    config = read(EDGE_PROXIES=" a:1, [::1]:2 ,10.0.0.1:3,")
    assert config.proxies == (Name(host="a", port=1), Name(host="::1", port=2), Name(host="10.0.0.1", port=3))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("EDGE_PROXIES", "", "is empty"),
        ("EDGE_PROXIES", "proxy", "'proxy' is not HOST:PORT"),
        ("EDGE_PROXIES", "proxy:0", "'proxy:0' is not HOST:PORT"),
        ("EDGE_PROXIES", "proxy:70000", "'proxy:70000' is not"),
        ("EDGE_LISTEN", "8000; evil", "not HOST:PORT"),
        ("EDGE_METRICS_LISTEN", "here", "not HOST:PORT"),
        ("EDGE_PROCESSES", "0", "not a number from 1 to 64"),
        ("EDGE_PROCESSES", "auto", "not a number from 1 to 64"),
        ("EDGE_CLIENTS", "65536", "not a number from 1 to 65535"),
        ("EDGE_RUN_DIR", "/run/a b;", "not an absolute path"),
        ("EDGE_TMP_DIR", "tmp", "not an absolute path"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        read(**{name: value})
    assert name in str(raised.value)


def test_keys_are_read_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}2\n")
    config = read(API_KEYS=KEY, API_KEYS_FILE=str(file))
    assert config.api_keys == (KEY, f"{KEY}2")
    assert KEY not in repr(config)


def test_it_is_published_where_it_listens_unless_told_otherwise() -> None:
    assert read(EDGE_LISTEN="[::1]:80").published == "[::1]"
    assert read(EDGE_PUBLISHED="127.0.0.1").published == "127.0.0.1"


def test_metrics_are_told_where_a_place_is_given_for_them() -> None:
    assert read().metrics_listen is None
    assert read(EDGE_METRICS_LISTEN="0.0.0.0:9145").metrics_listen == "0.0.0.0:9145"
    with pytest.raises(ConfigError, match="EDGE_METRICS_LISTEN is '9145'"):
        read(EDGE_METRICS_LISTEN="9145")
