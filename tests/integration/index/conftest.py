"""The index under test: in memory, on Valkey, on Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from prefixcache.limits import LEASE_S
from tests.integration.index.worlds import redis_world
from tests.support.index_worlds import MemoryWorld, World


@pytest.fixture
def lease_s() -> float:
    """Length of the leases in `world`; a test file that lets much time pass has its own."""
    return LEASE_S


@pytest.fixture(params=["memory", "valkey", "redis"])
async def world(request: pytest.FixtureRequest, lease_s: float) -> AsyncIterator[World]:
    if request.param == "memory":
        memory = MemoryWorld(lease_s=lease_s)
        yield memory
        await memory.index.check_integrity()
    else:
        server = request.getfixturevalue(f"{request.param}_process")
        server.flush()
        async with redis_world(server, lease_s=lease_s) as real:
            yield real
