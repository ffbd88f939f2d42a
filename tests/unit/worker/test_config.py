"""Sizes and addresses as people write them."""

from __future__ import annotations

import socket

import pytest

from prefixcache.errors import ConfigError
from worker.config import Address, advertised, parse_address, parse_memory, unique_worker_id


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("2GiB", 2 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("64kib", 64 * 2**10),
        ("1000000", 1_000_000),
        (" 10B ", 10),
    ],
)
def test_memory_sizes(text: str, size_bytes: int) -> None:
    assert parse_memory(text, setting="--kv-memory") == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2 G iB", "two GiB", "-1GiB", "2GiBs", "1e3", "0", "0.2B", "½GiB", "nan"])
def test_a_size_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory is") as caught:
        parse_memory(text, setting="--kv-memory")
    assert repr(text) in str(caught.value)


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
