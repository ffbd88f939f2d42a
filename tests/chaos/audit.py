"""What must be as before once all is healed and nobody asks: gauges, claims, descriptors, memory, the index."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import psutil

from prefixcache.errors import IntegrityError
from prefixcache.index.base import PrefixIndex
from prefixcache.limits import PENDING_S
from prefixcache.registry import WorkerRecord
from prefixcache.store import RedisStore
from tests.chaos.deployment import Deployment, Part, Proxy
from tests.support.pending_claims import pending_ends_s
from tests.support.program_fleet import get_json
from tests.support.scraping import scraped
from tests.support.waiting import eventually

QUIET_TIMEOUT_S = 20.0
MOST_MORE_DESCRIPTORS = 24
"""Over those of a process that has just begun: its connections to Redis, and those that are about to be closed."""
MOST_MORE_BYTES = 96 * 2**20
"""Likewise: caches that fill with use, of prompts and of placements."""

PROXY_GAUGES = ("num_requests_waiting", "num_requests_running", "num_requests_held")
WORKER_GAUGES = ("worker_requests_waiting", "worker_requests_running", "kv_cache_usage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of one process."""

    num_descriptors: int
    resident_bytes: int

    @classmethod
    def of(cls, part: Part) -> Size:
        process = psutil.Process(part.pid)
        return cls(num_descriptors=process.num_fds(), resident_bytes=process.memory_info().rss)


def sizes(deployment: Deployment) -> Mapping[str, Size]:
    """By part."""
    return {part.name: Size.of(part) for part in deployment.parts}


async def audit(deployment: Deployment, at_first: Mapping[str, Size], *, healed_at: float) -> list[str]:
    """Everything that is not as before, in words. `healed_at`: by time.time(), since when nobody did anything."""
    left: list[str] = []
    for proxy in deployment.proxies:
        left += await _lasting(proxy.name, partial(_load_of, proxy))
        changes = await scraped(proxy.program.url, "prefixcache_pending_claims_total", label="change")
        if changes.get("placed", 0) != changes.get("settled", 0) + changes.get("released", 0):
            left.append(f"{proxy.name}: claims of prompts {dict(changes)}")
    health = await get_json(deployment.proxies[0].program.url + "/health")
    for worker in health["workers"]:
        left += await _lasting(worker["id"], partial(_nonzero, f"http://{worker['address']}", WORKER_GAUGES))
    async with RedisStore.open(deployment.redis.url) as store:
        workers = await store.registry().live_workers()
        if len(workers) != len(deployment.workers):
            left.append(f"registered workers: {workers}")
        (namespace,) = {worker.namespace for worker in workers}
        left += await _lasting("index", partial(_broken, store.index(namespace), workers))
    left += await _lasting("pending claims", partial(_pending, deployment.redis.url, namespace, healed_at))
    return left + _grown(at_first, sizes(deployment))


async def _lasting(name: str, read: Callable[[], Awaitable[Mapping[str, object]]]) -> list[str]:
    """What is still to be read when there has been time for it to go."""
    found: Mapping[str, object] = {}

    async def is_gone() -> bool:
        nonlocal found
        found = await read()
        return not found

    with contextlib.suppress(AssertionError):
        await eventually(is_gone, QUIET_TIMEOUT_S)
    return [f"{name}: {dict(found)}"] if found else []


async def _load_of(proxy: Proxy) -> Mapping[str, object]:
    health = await get_json(proxy.program.url + "/health")
    busy = [worker for worker in health["workers"] if worker["waiting"] or worker["running"] or worker["ahead_s"]]
    return {**{worker["id"]: worker for worker in busy}, **await _nonzero(proxy.program.url, PROXY_GAUGES)}


async def _nonzero(url: str, gauges: Sequence[str]) -> Mapping[str, object]:
    values = {gauge: sum((await scraped(url, f"prefixcache_{gauge}")).values()) for gauge in gauges}
    return {gauge: value for gauge, value in values.items() if value}


async def _broken(index: PrefixIndex, workers: Sequence[WorkerRecord]) -> Mapping[str, object]:
    """A claim is named by a block that its worker caches, so none has more of them than such blocks."""
    most_claims = {}
    for worker in workers:
        cached = await scraped(f"http://{worker.address}", "prefixcache_worker_cached_blocks")
        most_claims[worker.incarnation] = int(sum(cached.values()))
    try:
        await index.check_integrity(most_claims)
    except IntegrityError as error:
        return {"integrity": error}
    return {}


async def _pending(url: str, namespace: str, healed_at: float) -> Mapping[str, object]:
    """But for what its proxy was killed with, or could not take back as Redis was away: that ends by itself."""
    ends = await asyncio.to_thread(pending_ends_s, url, namespace)
    lasting = [end_s - healed_at for end_s in ends if end_s > healed_at + PENDING_S]
    return {"end so many seconds after all was healed": lasting} if lasting else {}


def _grown(at_first: Mapping[str, Size], now: Mapping[str, Size]) -> list[str]:
    left = []
    for name, size in now.items():
        before = at_first[name]
        if size.num_descriptors > before.num_descriptors + MOST_MORE_DESCRIPTORS:
            left.append(f"{name}: {size.num_descriptors} descriptors, {before.num_descriptors} at first")
        if size.resident_bytes > before.resident_bytes + MOST_MORE_BYTES:
            left.append(f"{name}: {size.resident_bytes >> 20} MiB, {before.resident_bytes >> 20} at first")
    return left
