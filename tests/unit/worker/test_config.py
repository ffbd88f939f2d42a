"""Addresses as people write them."""

from __future__ import annotations

import socket

import pytest

from prefixcache.errors import ConfigError
from worker.config import Address, advertised, parse_address, unique_worker_id


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address(host="127.0.0.1", port=0)),
        ("worker-1.example:8001", Address(host="worker-1.example", port=8001)),
        ("[::1]:65535", Address(host="::1", port=65535)),
        (":8001", Address(host="", port=8001)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text, setting="--listen") == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "8001", "host", "host:", "host:x", "host:65536", "host:-1", "::1:8001", "h:1_0"])
def test_an_address_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--listen is .* must be HOST:PORT"):
        parse_address(text, setting="--listen")


def test_what_is_advertised() -> None:
    listening = Address(host="127.0.0.1", port=8001)
    assert advertised(listening, None) == listening
    told = Address(host="gpu-1", port=9)
    assert advertised(listening, told) == told
    assert advertised(listening, Address(host="gpu-1", port=0)) == Address(host="gpu-1", port=8001)
    for wildcard in ("0.0.0.0", "::", ""):
        assert advertised(Address(host=wildcard, port=8001), None) == Address(host=socket.gethostname(), port=8001)


def test_worker_ids_differ() -> None:
    assert len({unique_worker_id() for _ in range(20)}) > 15
