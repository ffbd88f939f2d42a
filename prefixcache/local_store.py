"""What one proxy process keeps for itself where there is no Redis: the same methods over the index in memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prefixcache.hashing import new_secret
from prefixcache.index.base import PrefixIndex
from prefixcache.index.memory_index import MemoryIndex
from prefixcache.index.memory_registry import MemoryRegistry
from prefixcache.registry import Registry


class LocalStore:
    """Never unavailable, and gone with the process. No worker can register in it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._indexes: dict[str, MemoryIndex] = {}
        self._registry = MemoryRegistry(self._indexes)
        self._secret: bytes | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[LocalStore]:
        yield cls()

    @property
    def index_available(self) -> bool:
        return True

    def index(self, namespace: str) -> PrefixIndex:
        """The index of a namespace; always the same object."""
        if namespace not in self._indexes:
            self._indexes[namespace] = MemoryIndex(clock=self._clock)
        return self._indexes[namespace]

    def registry(self) -> Registry:
        return self._registry

    async def memory(self) -> None:
        """There is no Redis."""

    async def deployment_secret(self, configured: bytes | None) -> bytes:
        """The first one that was configured, else one made up."""
        self._secret = self._secret or configured or new_secret()
        return self._secret
