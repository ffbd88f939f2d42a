"""A store in memory whose calls fail on demand, in place of RedisStore.

store = MemoryStore(clock=clock)           one content, as one Redis would have it
index = store.index(namespace)             FaultyIndex
registry = store.registry()                FaultyRegistry over the same leases
store.fail_next(3)                         the next three calls raise IndexUnavailable; a post is forgotten instead
store.unavailable = True                   all calls do, until it is False again
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import ApplyAnswer, Commit, Match, Registration, SweepAnswer
from prefixcache.index.family import Family
from prefixcache.index.memory_index import MemoryIndex
from prefixcache.index.memory_registry import MemoryRegistry
from prefixcache.limits import LEASE_S
from prefixcache.load import IncarnationLoad, ProxyLoad, WorkerLoad
from prefixcache.registry import WorkerRecord


class Faults:
    """Decides which calls find the store unavailable, and counts all calls."""

    def __init__(self) -> None:
        self.unavailable = False
        self.num_calls = 0
        self._to_fail = 0

    def fail_next(self, calls: int) -> None:
        self._to_fail += calls

    async def pass_or_fail(self) -> None:
        """Gives way to other tasks, as a call over a socket does."""
        self.num_calls += 1
        await asyncio.sleep(0)
        if (fault := self._next_fault()) is not None:
            raise IndexUnavailable(fault)

    def passes(self) -> bool:
        """The same for a call that nobody waits for."""
        self.num_calls += 1
        return self._next_fault() is None

    def _next_fault(self) -> str | None:
        if self._to_fail:
            self._to_fail -= 1
            return "scripted fault"
        return "scripted outage" if self.unavailable else None


class FaultyIndex(MemoryIndex):
    """An index whose faults are scripted."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        lease_s: float = LEASE_S,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(clock=clock, lease_s=lease_s)
        self.faults = faults or Faults()

    async def register(self) -> Registration:
        await self.faults.pass_or_fail()
        return await super().register()

    async def renew(self, incarnation: int, load: WorkerLoad | None = None) -> bool:
        await self.faults.pass_or_fail()
        return await super().renew(incarnation, load)

    async def retire(self, incarnation: int) -> None:
        await self.faults.pass_or_fail()
        await super().retire(incarnation)

    async def match(self, hashes: Sequence[int], *, candidates: Sequence[int] = ()) -> Match:
        await self.faults.pass_or_fail()
        return await super().match(hashes, candidates=candidates)

    async def commit(self, commit: Commit) -> Mapping[int, int]:
        await self.faults.pass_or_fail()
        return await super().commit(commit)

    def post(self, commit: Commit) -> None:
        if self.faults.passes():
            super().post(commit)

    async def exchange_loads(
        self, proxy_id: str, own: Mapping[int, ProxyLoad], incarnations: Sequence[int]
    ) -> Mapping[int, IncarnationLoad]:
        await self.faults.pass_or_fail()
        return await super().exchange_loads(proxy_id, own, incarnations)

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        await self.faults.pass_or_fail()
        return await super().apply(incarnation, batch, stored, removed)

    async def open_family(self, engine: str, *, instead_of: int | None = None) -> Family:
        await self.faults.pass_or_fail()
        return await super().open_family(engine, instead_of=instead_of)

    async def families(self, engines: Sequence[str], *, renew: Collection[str] = ()) -> Mapping[str, Family]:
        await self.faults.pass_or_fail()
        return await super().families(engines, renew=renew)

    async def claim(self, engine: str, anchor: int, hashes: Sequence[int], *, capacity: int) -> Family | None:
        await self.faults.pass_or_fail()
        return await super().claim(engine, anchor, hashes, capacity=capacity)

    async def sweep(self, keeper_id: str) -> SweepAnswer:
        await self.faults.pass_or_fail()
        return await super().sweep(keeper_id)


class FaultyRegistry(MemoryRegistry):
    """A registry whose faults are scripted."""

    def __init__(self, indexes: Mapping[str, MemoryIndex], faults: Faults) -> None:
        super().__init__(indexes)
        self.faults = faults

    async def announce(self, record: WorkerRecord, *, replace: bool = True) -> None:
        await self.faults.pass_or_fail()
        await super().announce(record, replace=replace)

    async def withdraw(self, record: WorkerRecord) -> None:
        await self.faults.pass_or_fail()
        await super().withdraw(record)

    async def namespaces(self) -> Collection[str]:
        await self.faults.pass_or_fail()
        return await super().namespaces()

    async def forget_namespace(self, namespace: str) -> None:
        await self.faults.pass_or_fail()
        await super().forget_namespace(namespace)

    async def workers(self) -> Mapping[WorkerRecord, bool]:
        await self.faults.pass_or_fail()
        return await super().workers()


class MemoryStore:
    """One content: indexes by namespace, registry and secret, with the methods of RedisStore."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, lease_s: float = LEASE_S) -> None:
        self.faults = Faults()
        self._clock = clock
        self._lease_s = lease_s
        self._indexes: dict[str, FaultyIndex] = {}
        self._registry = FaultyRegistry(self._indexes, self.faults)
        self._secret: bytes | None = None

    @property
    def unavailable(self) -> bool:
        return self.faults.unavailable

    @unavailable.setter
    def unavailable(self, value: bool) -> None:
        self.faults.unavailable = value

    @property
    def index_available(self) -> bool:
        return not self.faults.unavailable

    def fail_next(self, calls: int) -> None:
        self.faults.fail_next(calls)

    def index(self, namespace: str) -> FaultyIndex:
        if namespace not in self._indexes:
            self._indexes[namespace] = FaultyIndex(clock=self._clock, lease_s=self._lease_s, faults=self.faults)
        return self._indexes[namespace]

    def registry(self) -> FaultyRegistry:
        return self._registry

    async def deployment_secret(self, configured: bytes | None) -> bytes:
        await self.faults.pass_or_fail()
        if self._secret is None:
            self._secret = configured or secrets.token_bytes(32)
        return self._secret

    async def memory(self) -> None:
        """It does not tell, and no fault is spent on that."""

    async def ping(self) -> None:
        await self.faults.pass_or_fail()

    def flush(self) -> None:
        self._secret = None
        self._registry.records.clear()
        for index in self._indexes.values():
            index.flush()
