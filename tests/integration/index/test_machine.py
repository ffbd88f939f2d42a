"""The index on a real server against the one in memory, in histories that hypothesis makes up and shrinks."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from tests.integration.index.worlds import redis_world
from tests.support.index_machine import IndexMachine, run_machine
from tests.support.index_worlds import MemoryWorld, World
from tests.support.valkey import Server

LEASE_S = 100_000.0
"""Leases end when a step says so, never by the time that a history takes or lets pass."""


def machine_on(server: Server, writers: int) -> type[IndexMachine]:
    class RedisMachine(IndexMachine):
        num_writers = writers

        def open_worlds(self) -> tuple[World, tuple[World, World]]:
            server.flush()
            self.resources = AsyncExitStack()
            one, two = (
                self.run(self.resources.enter_async_context(redis_world(server, lease_s=LEASE_S, fields_per_bucket=2)))
                for _ in range(2)
            )
            return MemoryWorld(lease_s=LEASE_S), (one, two)

        def close_worlds(self) -> None:
            self.run(self.resources.aclose())

    return RedisMachine


@pytest.mark.parametrize("writers", [8, 40, 64])
def test_server_answers_as_memory(any_server: Server, writers: int) -> None:
    run_machine(machine_on(any_server, writers), f"{writers} writers on {any_server.name}")
