"""What all parts of the benchmark work with: one server, one client, namespaces, writers, and how costs are taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, cast

from prefixcache.index.hot_client import HotClient
from prefixcache.index.keys import NamespaceKeys
from prefixcache.index.redis_client import Argument, RedisClient
from prefixcache.index.redis_index import RedisIndex
from prefixcache.index.scripts import Script
from prefixcache.limits import MAX_APPLY_HASHES
from tests.bench.index.server import SLOW_CALL_S, BenchServer
from tests.bench.index.sizes import Sizes

KEY_PREFIX = "bench"
LEASE_S = 3_600.0
DEADLINE_S = 10.0
"""Far above that of the product: a busy machine must not end a measurement."""

Spread = tuple[float, float, float]
"""Least, median and greatest of some repeats."""


def spread(values: Sequence[float]) -> Spread:
    return min(values), statistics.median(values), max(values)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass(slots=True, kw_only=True)
class Writer:
    """The only writer of one incarnation."""

    index: RedisIndex
    incarnation: int
    batches: count[int] = field(default_factory=lambda: count(1))

    @classmethod
    async def register(cls, index: RedisIndex) -> Writer:
        return cls(index=index, incarnation=(await index.register()).incarnation)

    async def apply(self, stored: Sequence[int] = (), removed: Sequence[int] = ()) -> None:
        answer = await self.index.apply(self.incarnation, next(self.batches), stored, removed)
        assert answer.status == "ok", answer

    async def store(self, blocks: Sequence[int]) -> None:
        for start in range(0, len(blocks), MAX_APPLY_HASHES):
            await self.apply(blocks[start : start + MAX_APPLY_HASHES])


class Recorder:
    """Stands where an index has its HotClient and keeps the last script that it ran: for calls without the decoding."""

    def __init__(self, hot: HotClient) -> None:
        self._hot = hot
        self.script: Script | None = None
        self.arguments: tuple[Argument, ...] = ()

    async def run(self, script: Script, *arguments: Argument) -> Any:
        self.script, self.arguments = script, arguments
        return await self.again()

    async def again(self) -> Any:
        assert self.script is not None, "nothing was run"
        key, *arguments = self.arguments
        return await self._hot.run(self.script, str(key), *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    server: BenchServer
    client: RedisClient
    hot: HotClient
    sizes: Sizes
    random: Random
    namespaces: count[int] = field(default_factory=count)

    def new_keys(self) -> NamespaceKeys:
        """Those of a namespace that nobody has used."""
        return NamespaceKeys(key_prefix=KEY_PREFIX, namespace=f"{next(self.namespaces):016x}")

    def index(self, keys: NamespaceKeys) -> RedisIndex:
        """Its leases outlive the benchmark."""
        return RedisIndex(self.client, self.hot, keys, lease_s=LEASE_S)

    def recorded_index(self, keys: NamespaceKeys) -> tuple[RedisIndex, Recorder]:
        recorder = Recorder(self.hot)
        return RedisIndex(self.client, cast(HotClient, recorder), keys), recorder

    def new_index(self) -> RedisIndex:
        return self.index(self.new_keys())


@asynccontextmanager
async def open_bench(server: BenchServer, sizes: Sizes, seed: int) -> AsyncIterator[Bench]:
    client = RedisClient(server.url)
    try:
        async with HotClient.open(server.url, deadline_s=DEADLINE_S) as hot:
            yield Bench(server=server, client=client, hot=hot, sizes=sizes, random=Random(seed))
    finally:
        await client.aclose()


@dataclass(slots=True, kw_only=True)
class CallCosts:
    """Costs of calls made one after the other by one client, seconds."""

    server_s: list[float] = field(default_factory=list)
    """CPU of the whole server process from call to call: reading, script, reply, its own timers in between."""
    longest_s: list[float] = field(default_factory=list)
    """The same, but by the server's own stopwatch where that says less: it knows nothing of the timers, the CPU clock
    nothing of waits for a core. Each errs upwards only."""
    client_s: list[float] = field(default_factory=list)
    """From the call to its answer, by the client's clock."""

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.server_s) * 1e3

    def extend(self, other: CallCosts) -> None:
        self.server_s += other.server_s
        self.longest_s += other.longest_s
        self.client_s += other.client_s

    def row(self) -> dict[str, object]:
        return {
            "server ms, mean": self.mean_ms,
            "p99": percentile(self.longest_s, 0.99) * 1e3,
            "max": max(self.longest_s) * 1e3,
        }


async def call_costs(server: BenchServer, calls: Iterable[Callable[[], Awaitable[object]]]) -> CallCosts:
    costs = CallCosts()
    server.slow_call_s()
    cpu_s = server.cpu_s()
    for call in calls:
        began_s = time.perf_counter()
        await call()
        costs.client_s.append(time.perf_counter() - began_s)
        before_s, cpu_s = cpu_s, server.cpu_s()
        costs.server_s.append(cpu_s - before_s)
        costs.longest_s.append(cpu_s - before_s)
        if cpu_s - before_s > SLOW_CALL_S:
            costs.longest_s[-1] = min(cpu_s - before_s, server.slow_call_s() or SLOW_CALL_S)
            cpu_s = server.cpu_s()
    return costs


def cost_row(what: str, costs: Sequence[CallCosts]) -> dict[str, object]:
    """A table's row about calls of one kind; the rounds' means are told as least, median and most."""
    longest_s = [longest for one in costs for longest in one.longest_s]
    return {
        "calls": what,
        "number": len(longest_s),
        "server ms, mean": spread([one.mean_ms for one in costs]),
        "p99": percentile(longest_s, 0.99) * 1e3,
        "max": max(longest_s) * 1e3,
    }
