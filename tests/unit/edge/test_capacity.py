"""How many requests the edge takes, and that all of them together fit what its container has."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.capacity import IN_HAND_BYTES, WAITING_BYTES, capacity
from prefixcache.limits import EDGE_CLIENTS
from tests.support.compose_file import services

MIB = 1 << 20
PROGRAM_BYTES = 60 * MIB
"""The supervisor and nginx without a client, measured: 25 MB and some 6 for each list that still has streams."""
MANY_FILES = 65_536


def size_bytes(text: str) -> int:
    """Of "384m" or "1g"."""
    return int(text[:-1]) * {"m": MIB, "g": 1 << 30}[text[-1]]


def test_what_clients_may_hold_fits_the_container() -> None:
    room = capacity(num_clients=EDGE_CLIENTS, num_processes=2, num_files=MANY_FILES)
    for name in ("edge", "edge-engine"):
        service = services()[name]
        assert service["environment"]["EDGE_CLIENTS"] == EDGE_CLIENTS
        files = sum(size_bytes(size) for each in service["tmpfs"] for size in re.findall(r"size=(\w+)", each))
        memory = size_bytes(service["deploy"]["resources"]["limits"]["memory"])
        assert room.most_bytes + files + PROGRAM_BYTES <= memory, name


@given(st.integers(1, 65_535), st.integers(1, 64))
def test_every_request_has_a_connection_to_a_proxy(num_clients: int, num_processes: int) -> None:
    room = capacity(num_clients=num_clients, num_processes=num_processes, num_files=1_000_000)
    assert room.num_requests == num_clients
    assert room.num_connections * num_processes >= 2 * num_clients
    spare = room.num_connections * num_processes - 2 * num_clients
    assert room.most_bytes == num_clients * IN_HAND_BYTES + spare * WAITING_BYTES


@given(st.integers(1, 65_535), st.integers(1, 64), st.integers(64, MANY_FILES))
def test_no_process_opens_more_files_than_it_may(num_clients: int, num_processes: int, num_files: int) -> None:
    room = capacity(num_clients=num_clients, num_processes=num_processes, num_files=num_files)
    assert room.num_files == num_files
    assert room.num_connections * 3 // 2 <= num_files, "one for each connection, and one for each body"
    assert 1 <= room.num_requests <= num_clients


@pytest.mark.parametrize(("num_files", "num_requests"), [(1_024, 549), (256, 94), (64, 1)])
def test_with_few_files_there_are_fewer_requests(num_files: int, num_requests: int) -> None:
    assert capacity(num_clients=4_096, num_processes=2, num_files=num_files).num_requests == num_requests
