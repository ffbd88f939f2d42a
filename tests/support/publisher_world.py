"""A publisher against an index in memory whose answers fail, get lost or say that all is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import ApplyAnswer
from prefixcache.load import WorkerLoad
from prefixcache.metrics import WorkerMetrics
from prefixcache.registry import WorkerRecord
from tests.support.memory_store import FaultyIndex, MemoryStore
from tests.support.waiting import eventually
from worker.index_changes import IndexChanges
from worker.publisher import Publisher

NAMESPACE = "0" * 16

RECORD = WorkerRecord(
    worker_id="w",
    address="127.0.0.1:1",
    namespace=NAMESPACE,
    incarnation=0,
    protocol=(1, 0),
    model="m",
    revision="r",
    served_names=("m",),
    tokenizer_fingerprint="f",
    vocab_size=10,
    max_model_len=10,
    stop_token_ids=(),
    block_size=16,
    stride=4,
    num_blocks=4,
    kv_bytes_per_token=1,
    started_at=0.0,
)


class WatchedIndex(FaultyIndex):
    """Keeps every batch it was sent, and can lose an answer after it applied the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        self.answers_to_lose = 0
        self.next_answer: ApplyAnswer | None = None
        self.next_error: Exception | None = None
        self.refuses_batches = False
        self.forgets = False
        """Counts a batch and loses what it says."""
        self.num_renewals = 0
        self.loads: list[WorkerLoad] = []

    async def renew(self, incarnation: int, load: WorkerLoad | None = None) -> bool:
        self.num_renewals += 1
        assert load is not None
        self.loads.append(load)
        return await super().renew(incarnation, load)

    async def rewind(self, incarnation: int, *, batch: int, held: set[int]) -> None:
        """As if the store had been restored from a copy made after that batch."""
        await self.retire(incarnation)
        index_id = self._index_id
        self._last_incarnation = incarnation - 1
        assert (await super().register()).incarnation == incarnation
        assert self._index_id == index_id
        for number in range(1, batch + 1):
            await super().apply(incarnation, number, sorted(held), [])

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        self.batches.append((incarnation, batch, tuple(stored), tuple(removed)))
        if self.refuses_batches:
            raise IndexUnavailable("its memory is full")
        if self.next_error is not None:
            error, self.next_error = self.next_error, None
            raise error
        if self.next_answer is not None:
            answer, self.next_answer = self.next_answer, None
            return answer
        said = ([], []) if self.forgets else (stored, removed)
        answer = await super().apply(incarnation, batch, *said)
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise IndexUnavailable("the answer was lost")
        return answer


class World:
    """A publisher with everything around it."""

    def __init__(self, *, reannounce_jitter_s: float, check_s: float = 60.0) -> None:
        self.index = WatchedIndex()
        self.store = MemoryStore()
        self.registry = self.store.registry()
        self.changes = IndexChanges()
        self.metrics = WorkerMetrics()
        self.rest_s = 0.0
        self.publisher = Publisher(
            index=self.index,
            registry=self.registry,
            changes=self.changes,
            measure=self.measured,
            record=RECORD,
            metrics=self.metrics,
            random=Random(1),
            reannounce_jitter_s=reannounce_jitter_s,
            renewal_s=0.02,
            retry_s=0.01,
            check_s=check_s,
        )

    def measured(self) -> WorkerLoad:
        return WorkerLoad(
            rest_s=self.rest_s, prefill_rate=5, inter_token_latency_s=0.1, available_blocks=3, oldest_age_s=2
        )

    def put(self, *values: int) -> None:
        for value in values:
            self.changes.store(value)
        self.publisher.wake()

    def drop(self, *values: int) -> None:
        for value in values:
            self.changes.remove(value)
        self.publisher.wake()

    def repair(self, *values: int) -> None:
        """Somebody read something wrong of these."""
        self.changes.repair(self.publisher.incarnation, values)
        self.publisher.wake()

    def told(self) -> set[int]:
        """What the index holds for the current incarnation."""
        return set(self.index.held_by(self.publisher.incarnation))

    async def settled(self) -> None:
        """Until the index of a live incarnation holds exactly what the pool holds."""

        def agrees() -> bool:
            return self.index.is_live(self.publisher.incarnation) and self.told() == self.changes.held()

        await eventually(agrees)


@asynccontextmanager
async def publishing(
    *, reannounce_jitter_s: float = 0.0, is_up: bool = True, check_s: float = 60.0
) -> AsyncIterator[World]:
    world = World(reannounce_jitter_s=reannounce_jitter_s, check_s=check_s)
    world.index.faults.unavailable = not is_up
    task = asyncio.create_task(world.publisher.run())
    try:
        if is_up:
            await asyncio.wait_for(world.publisher.registered(), 5)
        yield world
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await world.index.check_integrity()
