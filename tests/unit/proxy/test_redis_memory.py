"""The metrics of Redis' memory follow what it says, and say nothing where it does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.metrics import ProxyMetrics
from prefixcache.store import RedisMemory
from proxy.redis_memory import RedisMemoryWatch
from proxy.warnings_log import QuietLog
from tests.support.memory_store import MemoryStore
from tests.support.waiting import eventually


class Telling(MemoryStore):
    """Says one thing after the other, the last one for ever."""

    def __init__(self, said: Sequence[RedisMemory | IndexUnavailable | None]) -> None:
        super().__init__()
        self._said = list(said)

    async def memory(self) -> RedisMemory | None:  # type: ignore[override]  # which never tells
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        if isinstance(said, IndexUnavailable):
            raise said
        return said


def watching(said: Sequence[RedisMemory | IndexUnavailable | None], metrics: ProxyMetrics) -> RedisMemoryWatch:
    return RedisMemoryWatch(Telling(said), metrics, QuietLog(logging.getLogger(__name__)), pause_s=0.0)


def values(metrics: ProxyMetrics) -> tuple[float | None, float | None]:
    read = metrics.registry.get_sample_value
    return read("prefixcache_redis_memory_bytes"), read("prefixcache_redis_memory_limit_bytes")


@pytest.mark.parametrize("silence", [None, IndexUnavailable("gone")], ids=["not told", "away"])
async def test_what_is_not_known_any_more_is_not_told(silence: IndexUnavailable | None) -> None:
    metrics = ProxyMetrics()
    watch = watching([RedisMemory(used_bytes=7, limit_bytes=9), silence], metrics)
    assert (values(metrics), watch.is_full) == ((0, 0), None)
    await watch.look()
    assert (values(metrics), watch.is_full) == ((7, 9), False)
    await watch.look()
    assert (values(metrics), watch.is_full) == ((0, 0), None)


async def test_one_that_is_full_is_told_of_by_the_name_of_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    full = RedisMemory(used_bytes=9_000_000, limit_bytes=8_000_000)
    watch = watching([full, full, RedisMemory(used_bytes=9, limit_bytes=0)], ProxyMetrics())
    for _ in range(2):
        await watch.look()
        assert watch.is_full
    (warning,) = caplog.messages
    assert "maxmemory of 8.0 MB" in warning
    await watch.look()
    assert watch.is_full is False, "without a limit nothing is full"


async def test_looks_again_and_again() -> None:
    metrics = ProxyMetrics()
    said: list[RedisMemory | IndexUnavailable | None] = [
        RedisMemory(used_bytes=1, limit_bytes=0),
        IndexUnavailable("away"),
        RedisMemory(used_bytes=2, limit_bytes=0),
    ]
    task = asyncio.create_task(watching(said, metrics).run())
    await eventually(lambda: values(metrics) == (2, 0))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
