"""A store in memory whose integrity is checked afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.memory_store import MemoryStore


class CheckedStore(MemoryStore):
    """Leases that never end, and every index it gave out checked at the end."""

    def __init__(self) -> None:
        super().__init__(lease_s=float("inf"))

    async def check_integrity(self) -> None:
        self.unavailable = False
        for index in self._indexes.values():
            await index.check_integrity()


@pytest_asyncio.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = CheckedStore()
    yield store
    await store.check_integrity()
