"""Index and registry in memory: the dumb truth that the real ones are compared with, and a fake for other tests.

store = MemoryStore(clock=clock)           one content, as one Redis would have it
index = store.index(namespace)             MemoryIndex
registry = store.registry()                MemoryRegistry over the same leases
store.fail_next(3)                         the next three calls raise IndexUnavailable
store.unavailable = True                   all calls do, until it is False again
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from prefixcache.errors import IndexUnavailable, IntegrityError
from prefixcache.index.base import ApplyAnswer, PrefixIndex, Registration
from prefixcache.limits import LEASE_S, MAX_APPLY_HASHES
from prefixcache.registry import Registry, WorkerRecord

Clock = Callable[[], float]


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
        if self._to_fail:
            self._to_fail -= 1
            raise IndexUnavailable("scripted fault")
        if self.unavailable:
            raise IndexUnavailable("scripted outage")


class MemoryIndex(PrefixIndex):
    """Claims as plain sets; a match looks at every block."""

    def __init__(
        self, *, clock: Clock = time.monotonic, lease_s: float = LEASE_S, faults: Faults | None = None
    ) -> None:
        self.faults = faults or Faults()
        self._clock = clock
        self._lease_s = lease_s
        self._last_incarnation = 0
        self._index_id = ""
        self._leases: dict[int, float] = {}
        self._batches: dict[int, int] = {}
        self._holders: dict[int, set[int]] = {}
        self._held: dict[int, set[int]] = {}

    async def register(self) -> Registration:
        await self.faults.pass_or_fail()
        self._index_id = self._index_id or secrets.token_hex(8)
        self._last_incarnation += 1
        self._leases[self._last_incarnation] = self._clock() + self._lease_s
        self._batches[self._last_incarnation] = 0
        return Registration(incarnation=self._last_incarnation, index_id=self._index_id)

    async def renew(self, incarnation: int) -> bool:
        await self.faults.pass_or_fail()
        if incarnation not in self._leases:
            return False
        self._leases[incarnation] = self._clock() + self._lease_s
        return True

    async def retire(self, incarnation: int) -> None:
        await self.faults.pass_or_fail()
        self._leases.pop(incarnation, None)
        self._batches.pop(incarnation, None)

    async def match(self, hashes: Sequence[int]) -> Mapping[int, int]:
        await self.faults.pass_or_fail()
        depths: dict[int, int] = {}
        for depth, block in enumerate(hashes, start=1):
            for incarnation in self._holders.get(block, ()):
                if self.is_live(incarnation):
                    depths[incarnation] = depth
        return depths

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        if len(stored) + len(removed) > MAX_APPLY_HASHES:
            raise ValueError(f"a batch of {len(stored) + len(removed)} hashes; at most {MAX_APPLY_HASHES} are allowed")
        await self.faults.pass_or_fail()
        if incarnation not in self._leases:
            return ApplyAnswer(status="dead", index_id=self._index_id)
        last = self._batches[incarnation]
        if batch != last + 1:
            return ApplyAnswer(status="old" if batch <= last else "gap", index_id=self._index_id)
        self._batches[incarnation] = batch
        held = self._held.setdefault(incarnation, set())
        for block in stored:
            held.add(block)
            self._holders.setdefault(block, set()).add(incarnation)
        for block in removed:
            held.discard(block)
            self._holders.get(block, set()).discard(incarnation)
        return ApplyAnswer(status="ok", index_id=self._index_id)

    async def check_integrity(self) -> None:
        stored = {(i, block) for block, holders in self._holders.items() for i in holders}
        counted = {(i, block) for i, blocks in self._held.items() for block in blocks}
        if stored != counted:
            raise IntegrityError(f"claims by block and by incarnation differ in {stored ^ counted}")

    def is_live(self, incarnation: int) -> bool:
        return self._leases.get(incarnation, float("-inf")) > self._clock()

    def held_by(self, incarnation: int) -> frozenset[int]:
        """Hashes of the index blocks that the incarnation claims."""
        return frozenset(self._held.get(incarnation, ()))

    def expire(self, incarnation: int) -> None:
        """Ends the lease without removing it: the next renewal brings the incarnation back."""
        self._leases[incarnation] = float("-inf")

    def flush(self) -> None:
        """What FLUSHALL does: everything is gone, and ids go on."""
        self._index_id = ""
        for content in (self._leases, self._batches, self._holders, self._held):
            content.clear()


class MemoryRegistry(Registry):
    """Records by worker id; leases are those of the indexes in `indexes`, by namespace."""

    def __init__(self, indexes: Mapping[str, MemoryIndex], *, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._indexes = indexes
        self.records: dict[str, WorkerRecord] = {}

    async def announce(self, record: WorkerRecord) -> None:
        await self.faults.pass_or_fail()
        self.records[record.worker_id] = record

    async def withdraw(self, worker_id: str) -> None:
        await self.faults.pass_or_fail()
        self.records.pop(worker_id, None)

    async def live_workers(self) -> Sequence[WorkerRecord]:
        await self.faults.pass_or_fail()
        return [record for record in self.records.values() if self._is_live(record)]

    def _is_live(self, record: WorkerRecord) -> bool:
        index = self._indexes.get(record.namespace)
        return index is not None and index.is_live(record.incarnation)


class MemoryStore:
    """One content: indexes by namespace, registry and secret, with the methods of RedisStore."""

    def __init__(self, *, clock: Clock = time.monotonic, lease_s: float = LEASE_S) -> None:
        self.faults = Faults()
        self._clock = clock
        self._lease_s = lease_s
        self._indexes: dict[str, MemoryIndex] = {}
        self._registry = MemoryRegistry(self._indexes, faults=self.faults)
        self._secret: bytes | None = None

    @property
    def unavailable(self) -> bool:
        return self.faults.unavailable

    @unavailable.setter
    def unavailable(self, value: bool) -> None:
        self.faults.unavailable = value

    def fail_next(self, calls: int) -> None:
        self.faults.fail_next(calls)

    def index(self, namespace: str) -> MemoryIndex:
        if namespace not in self._indexes:
            self._indexes[namespace] = MemoryIndex(clock=self._clock, lease_s=self._lease_s, faults=self.faults)
        return self._indexes[namespace]

    def registry(self) -> MemoryRegistry:
        return self._registry

    async def deployment_secret(self, configured: bytes | None) -> bytes:
        await self.faults.pass_or_fail()
        if self._secret is None:
            self._secret = configured or secrets.token_bytes(32)
        return self._secret

    async def ping(self) -> None:
        await self.faults.pass_or_fail()

    def flush(self) -> None:
        self._secret = None
        self._registry.records.clear()
        for index in self._indexes.values():
            index.flush()
