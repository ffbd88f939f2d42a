"""The publisher against an index in memory whose answers fail, get lost or say that all is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

import msgspec
import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import ApplyAnswer, ApplyStatus
from prefixcache.limits import MAX_APPLY_HASHES
from prefixcache.metrics import WorkerMetrics
from prefixcache.registry import WorkerRecord
from tests.support.memory_store import FaultyIndex, MemoryStore
from tests.support.seeds import seeded
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
        self.num_renewals = 0

    async def renew(self, incarnation: int) -> bool:
        self.num_renewals += 1
        return await super().renew(incarnation)

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        self.batches.append((incarnation, batch, tuple(stored), tuple(removed)))
        if self.next_error is not None:
            error, self.next_error = self.next_error, None
            raise error
        if self.next_answer is not None:
            answer, self.next_answer = self.next_answer, None
            return answer
        answer = await super().apply(incarnation, batch, stored, removed)
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise IndexUnavailable("the answer was lost")
        return answer


class World:
    """A publisher with everything around it."""

    def __init__(self, *, reannounce_jitter_s: float) -> None:
        self.index = WatchedIndex()
        self.store = MemoryStore()
        self.registry = self.store.registry()
        self.changes = IndexChanges()
        self.metrics = WorkerMetrics()
        self.publisher = Publisher(
            index=self.index,
            registry=self.registry,
            changes=self.changes,
            record=RECORD,
            metrics=self.metrics,
            random=Random(1),
            reannounce_jitter_s=reannounce_jitter_s,
            renewal_s=0.02,
            retry_s=0.01,
        )

    def put(self, *values: int) -> None:
        for value in values:
            self.changes.store(value)
        self.publisher.wake()

    def drop(self, *values: int) -> None:
        for value in values:
            self.changes.remove(value)
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
async def publishing(*, reannounce_jitter_s: float = 0.0, is_up: bool = True) -> AsyncIterator[World]:
    world = World(reannounce_jitter_s=reannounce_jitter_s)
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


async def test_it_registers_announces_and_publishes_changes() -> None:
    async with publishing() as world:
        record = world.registry.records["w"]
        assert record.incarnation == world.publisher.incarnation > 0
        world.put(1, 2, 3)
        await world.settled()
        world.drop(2)
        world.put(4)
        await world.settled()
        assert [batch for _, batch, _, _ in world.index.batches] == [1, 2]
        assert world.metrics.published_hashes.labels("stored")._value.get() == 4
        assert world.metrics.published_hashes.labels("removed")._value.get() == 1


async def test_changes_are_published_promptly_not_at_the_next_renewal() -> None:
    world = World(reannounce_jitter_s=0.0)
    world.publisher._renewal_s = 60.0
    task = asyncio.create_task(world.publisher.run())
    await world.publisher.registered()
    world.put(1)
    await eventually(lambda: world.told() == {1}, timeout_s=1.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.index.check_integrity()


async def test_many_changes_go_in_batches_of_the_allowed_size() -> None:
    async with publishing() as world:
        world.put(*range(3 * MAX_APPLY_HASHES + 5))
        await world.settled()
        sizes = [len(stored) for _, _, stored, _ in world.index.batches]
        assert sizes == [MAX_APPLY_HASHES] * 3 + [5]
        assert [batch for _, batch, _, _ in world.index.batches] == [1, 2, 3, 4]


async def test_an_unanswered_batch_is_sent_again_identically_and_old_is_an_answer() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
        world.index.answers_to_lose = 2
        world.put(1, 2)
        await eventually(lambda: len(world.index.batches) >= 1)
        world.drop(1)
        world.put(3)
        await world.settled()
        assert world.index.batches == [(incarnation, 1, (1, 2), ())] * 3 + [(incarnation, 2, (3,), (1,))]
        assert world.publisher.incarnation == incarnation
        assert world.metrics.publish_failures._value.get() == 2


async def test_an_outage_loses_nothing_and_keeps_the_incarnation() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
        world.put(1, 2)
        await world.settled()
        world.index.faults.unavailable = True
        world.drop(1)
        world.put(3)
        await eventually(lambda: world.metrics.publish_failures._value.get() >= 2)
        world.index.faults.unavailable = False
        await world.settled()
        assert world.publisher.incarnation == incarnation


async def test_it_waits_for_an_index_that_is_down_at_first() -> None:
    async with publishing(is_up=False) as world:
        world.put(1)
        await eventually(lambda: world.index.faults.num_calls >= 3)
        assert world.publisher.incarnation == 0
        world.index.faults.unavailable = False
        await asyncio.wait_for(world.publisher.registered(), 5)
        await world.settled()


async def test_an_expired_lease_comes_back_with_the_next_renewal() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
        world.index.expire(incarnation)
        await eventually(lambda: world.index.is_live(incarnation))
        assert world.publisher.incarnation == incarnation


async def test_a_flushed_index_gets_a_new_incarnation_and_everything_again() -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.put(*range(300))
        await world.settled()
        world.index.flush()
        world.registry.records.clear()
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()
        assert world.registry.records["w"].incarnation == world.publisher.incarnation
        assert world.index.batches[-1][1] == 2


@pytest.mark.parametrize("status", ["gap", "dead", "old"])
async def test_an_answer_that_contradicts_what_was_sent_begins_anew(status: ApplyStatus) -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.put(1)
        await world.settled()
        world.index.next_answer = ApplyAnswer(status=status, index_id=world.index._index_id)
        world.put(2)
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()
        assert world.told() == {1, 2}
        assert not world.index.is_live(first)


async def test_another_index_id_begins_anew() -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.index.next_answer = ApplyAnswer(status="ok", index_id="another")
        world.put(1)
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()


async def test_an_unexpected_error_is_logged_and_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.index.next_error = ZeroDivisionError("a bug")
        world.put(1)
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()
        assert "a bug" in caplog.text


async def test_only_a_fault_spreads_the_announcement_and_the_lease_is_kept_meanwhile() -> None:
    async with publishing(reannounce_jitter_s=1_000.0) as world:
        first = world.publisher.incarnation
        world.put(1)
        await world.settled()
        world.index.flush()
        await eventually(lambda: world.publisher.incarnation != first)
        renewals = world.index.num_renewals
        await eventually(lambda: world.index.num_renewals >= renewals + 3)
        assert world.told() == set()
        assert world.registry.records["w"].incarnation == world.publisher.incarnation


async def test_a_record_that_could_not_be_announced_is_announced_later() -> None:
    world = World(reannounce_jitter_s=0.0)
    world.store.fail_next(2)
    task = asyncio.create_task(world.publisher.run())
    await asyncio.wait_for(world.publisher.registered(), 5)
    assert world.registry.records["w"].incarnation == world.publisher.incarnation
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_record_that_was_lost_comes_back_but_never_over_that_of_another_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.publisher.LEASE_S", 0.05)
    async with publishing() as world:
        own = world.publisher.record
        world.registry.records.clear()
        await eventually(lambda: world.registry.records.get("w") == own)
        taken = msgspec.structs.replace(own, address="127.0.0.1:2")
        world.registry.records["w"] = taken
        renewals = world.index.num_renewals
        await eventually(lambda: world.index.num_renewals >= renewals + 10)
        assert world.registry.records["w"] == taken
        del world.registry.records["w"]
        await eventually(lambda: world.registry.records.get("w") == own)


async def test_closing_leaves_the_record_of_the_one_that_took_the_name() -> None:
    async with publishing() as world:
        pass
    taken = msgspec.structs.replace(world.publisher.record, address="127.0.0.1:2")
    world.registry.records["w"] = taken
    await world.publisher.close()
    assert world.registry.records == {"w": taken}


async def test_closing_ends_the_lease_and_withdraws_the_record() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
    await world.publisher.close()
    assert not world.index.is_live(incarnation)
    assert "w" not in world.registry.records


async def test_closing_without_an_index_ends_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing() as world:
        pass
    world.index.faults.unavailable = True
    world.store.unavailable = True
    await world.publisher.close()
    assert "not retired" in caplog.text
    assert "not withdrawn" in caplog.text


async def test_random_faults_never_leave_the_index_wrong() -> None:
    random = seeded("publisher")
    async with publishing() as world:
        for _ in range(300):
            action = random.random()
            held = sorted(world.changes.held())
            if action < 0.5:
                world.put(*{random.randrange(60) for _ in range(5)}.difference(held))
            elif action < 0.8 and held:
                world.drop(*{random.choice(held) for _ in range(3)})
            elif action < 0.86:
                world.index.answers_to_lose = random.randrange(3)
            elif action < 0.92:
                world.index.faults.fail_next(random.randrange(3))
            elif action < 0.94:
                world.index.flush()
            await asyncio.sleep(0.001 if random.random() < 0.3 else 0)
        await world.settled()
