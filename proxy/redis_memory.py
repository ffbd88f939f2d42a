"""Redis' own account of its memory: one that is full refuses what workers announce beyond their presence."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

from prefixcache.errors import IndexUnavailable
from prefixcache.limits import REDIS_MEMORY_S
from prefixcache.metrics import ProxyMetrics
from proxy.store import Store
from proxy.warnings_log import QuietLog

_logger = logging.getLogger(__name__)


class RedisMemoryWatch:
    """Looks now and then; without an answer the metrics say that nothing is known."""

    def __init__(self, store: Store, metrics: ProxyMetrics, log: QuietLog, *, pause_s: float = REDIS_MEMORY_S) -> None:
        self._store = store
        self._metrics = metrics
        self._log = log
        self._pause_s = pause_s
        self.is_full: bool | None = None
        """When it was looked last; None where it is not known."""

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
        self.is_full = None if memory is None else memory.is_full
        if memory is not None and memory.is_full:
            self._log.warning(
                "redis memory",
                "Redis has used up its maxmemory of %.1f MB: what workers hold from now on is announced to nobody; "
                "raise maxmemory",
                memory.limit_bytes / 1e6,
            )
