"""The index under test: in memory, on Valkey, on Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.index.worlds import redis_world
from tests.support.index_worlds import MemoryWorld, World


@pytest.fixture(params=["memory", "valkey", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        memory = MemoryWorld()
        yield memory
        await memory.index.check_integrity()
    else:
        server = request.getfixturevalue(f"{request.param}_process")
        server.flush()
        async with redis_world(server) as real:
            yield real
