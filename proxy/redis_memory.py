"""Redis' own account of its memory, for the metrics: one that is full refuses what workers announce."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from prefixcache.errors import IndexUnavailable
from prefixcache.limits import REDIS_MEMORY_S
from prefixcache.metrics import ProxyMetrics
from proxy.store import Store

_logger = logging.getLogger(__name__)


class RedisMemoryWatch:
    """Looks now and then; without an answer the metrics say that nothing is known."""

    def __init__(self, store: Store, metrics: ProxyMetrics, *, pause_s: float = REDIS_MEMORY_S) -> None:
        self._store = store
        self._metrics = metrics
        self._pause_s = pause_s

    async def run(self) -> NoReturn:
        while True:
            await self.look()
            await asyncio.sleep(self._pause_s)

    async def look(self) -> None:
        try:
            memory = await self._store.memory()
        except IndexUnavailable as error:
            _logger.debug("Redis does not tell its memory: %s", error)
            memory = None
        self._metrics.redis_memory.set(0 if memory is None else memory.used_bytes)
        self._metrics.redis_memory_limit.set(0 if memory is None else memory.limit_bytes)
