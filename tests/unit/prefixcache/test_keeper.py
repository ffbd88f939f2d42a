"""The keeper's turns over a store in memory, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import SweepAnswer
from prefixcache.keeper import Keeper
from prefixcache.limits import DEAD_AFTER_S, KEEPER_PAUSE_S, KEEPER_S, LEASE_S, RECORD_DEAD_AFTER_S
from prefixcache.registry import WorkerRecord
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import FaultyIndex, MemoryStore
from tests.support.waiting import eventually
from tests.support.worker_records import worker_record

ONE, TWO = "0" * 16, "1" * 16
LOGGER = "prefixcache.keeper"


class Deployment:
    """A store with a keeper, and workers that can fall silent."""

    def __init__(self) -> None:
        self.clock = ManualClock(1_000.0)
        self.store = MemoryStore(clock=self.clock)
        self.keeper = Keeper(self.store, keeper_id="k1", clock=self.clock)
        self.renewed: set[WorkerRecord] = set()

    async def start(self, worker_id: str, namespace: str = ONE) -> WorkerRecord:
        registration = await self.store.index(namespace).register()
        record = worker_record(worker_id=worker_id, namespace=namespace, incarnation=registration.incarnation)
        await self.store.registry().announce(record)
        await self.store.index(namespace).apply(record.incarnation, 1, [1, 2, 3], [])
        self.renewed.add(record)
        return record

    async def turns(self, passed_s: float) -> None:
        """Time passes, the keeper has its turns, and whoever is not silent renews its lease."""
        end_s = self.clock.now + passed_s
        while self.clock.now < end_s:
            self.clock.now += KEEPER_PAUSE_S
            if not self.store.unavailable:
                for record in self.renewed:
                    await self.store.index(record.namespace).renew(record.incarnation)
            await self.keeper.turn()

    def holds_claims(self, record: WorkerRecord) -> bool:
        return bool(self.store.index(record.namespace).held_by(record.incarnation))

    def workers(self) -> set[str]:
        return set(self.store.registry().records)


class BusyIndex(FaultyIndex):
    """Says what it is told, and remembers who asked when."""

    def __init__(self, answers: Sequence[SweepAnswer | Exception], clock: ManualClock, call_s: float = 0.0) -> None:
        super().__init__(clock=clock)
        self.answers = list(answers)
        self.clock = clock
        self.call_s = call_s
        self.num_sweeps = 0

    async def sweep(self, keeper_id: str) -> SweepAnswer:
        self.num_sweeps += 1
        self.clock.now += self.call_s
        answer = self.answers.pop(0) if self.answers else SweepAnswer(status="idle")
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_the_dead_are_swept_and_the_living_stay() -> None:
    deployment = Deployment()
    living, dead = await deployment.start("living"), await deployment.start("dead")
    deployment.renewed.discard(dead)
    await deployment.turns(DEAD_AFTER_S)
    assert deployment.holds_claims(dead)
    await deployment.turns(LEASE_S + 2)
    assert not deployment.holds_claims(dead)
    assert deployment.holds_claims(living)


async def test_every_namespace_is_swept() -> None:
    deployment = Deployment()
    dead = [await deployment.start("a", ONE), await deployment.start("b", TWO)]
    deployment.renewed.clear()
    await deployment.turns(DEAD_AFTER_S + LEASE_S + 2)
    assert not any(deployment.holds_claims(record) for record in dead)


async def test_one_of_two_keepers_does_the_work_and_the_other_takes_over() -> None:
    deployment = Deployment()
    await deployment.start("w")
    other = Keeper(deployment.store, keeper_id="k2", clock=deployment.clock)
    index = deployment.store.index(ONE)
    await deployment.keeper.turn()
    await other.turn()
    assert (await index.sweep("k1")).status == "idle"
    assert (await index.sweep("k2")).status == "other"
    deployment.clock.now += KEEPER_S
    await other.turn()
    assert (await index.sweep("k1")).status == "other"


async def test_a_record_goes_after_its_time_without_a_lease() -> None:
    deployment = Deployment()
    dead = await deployment.start("dead")
    await deployment.start("living")
    deployment.renewed.discard(dead)
    await deployment.turns(RECORD_DEAD_AFTER_S)
    assert deployment.workers() == {"dead", "living"}
    await deployment.turns(LEASE_S + 2)
    assert deployment.workers() == {"living"}


async def test_time_in_which_nobody_watched_does_not_count_for_a_record() -> None:
    deployment = Deployment()
    await deployment.start("w")
    deployment.renewed.clear()
    await deployment.turns(RECORD_DEAD_AFTER_S - 10)
    deployment.store.unavailable = True
    await deployment.turns(KEEPER_S + 2)
    deployment.store.unavailable = False
    await deployment.turns(RECORD_DEAD_AFTER_S - 10)
    assert deployment.workers() == {"w"}
    await deployment.turns(20)
    assert deployment.workers() == set()


async def test_a_short_fault_does_not_begin_the_watch_anew() -> None:
    deployment = Deployment()
    await deployment.start("w")
    deployment.renewed.clear()
    await deployment.turns(RECORD_DEAD_AFTER_S - 10)
    deployment.store.unavailable = True
    await deployment.turns(KEEPER_S / 2)
    deployment.store.unavailable = False
    await deployment.turns(10 + LEASE_S)
    assert deployment.workers() == set()


async def test_a_worker_that_came_back_under_another_incarnation_is_watched_anew() -> None:
    deployment = Deployment()
    await deployment.start("w")
    deployment.renewed.clear()
    await deployment.turns(RECORD_DEAD_AFTER_S - 10)
    again = await deployment.start("w")
    deployment.renewed.clear()
    await deployment.turns(RECORD_DEAD_AFTER_S - 10)
    assert deployment.store.registry().records == {"w": again}


async def test_a_lease_that_comes_back_begins_the_time_anew() -> None:
    deployment = Deployment()
    record = await deployment.start("w")
    deployment.renewed.clear()
    deployment.store.index(ONE).expire(record.incarnation)
    await deployment.turns(DEAD_AFTER_S - 2)
    deployment.renewed.add(record)
    await deployment.turns(2)
    assert deployment.keeper._gone_since_s == {}
    assert deployment.holds_claims(record)


async def test_a_namespace_is_swept_until_nothing_is_left_long_after_its_last_record() -> None:
    deployment = Deployment()
    index = BusyIndex([], deployment.clock)
    deployment.store._indexes[ONE] = index
    record = await deployment.start("w")
    await deployment.keeper.turn()
    await deployment.store.registry().withdraw(record)
    deployment.renewed.clear()
    await deployment.turns(RECORD_DEAD_AFTER_S - 2)
    index.answers = [SweepAnswer(status=status) for status in ("idle", "other", "other", "more", "idle")]
    index.num_sweeps = 0
    await deployment.turns(3)
    assert index.num_sweeps == 3, "another one had the office"
    for _ in range(2):
        await deployment.keeper.turn()
        assert index.num_sweeps == 5, "more, then nothing is left"


async def test_a_namespace_whose_worker_took_another_one_is_swept_all_the_same() -> None:
    """The name, killed, comes back with another model while its lease of before is not dead yet: nobody names that."""
    deployment = Deployment()
    killed = await deployment.start("w", ONE)
    await deployment.turns(2)
    deployment.renewed.clear()
    await deployment.start("w", TWO)
    await deployment.turns(2)
    deployment.store.unavailable = True  # however long nobody could watch
    await deployment.turns(2 * RECORD_DEAD_AFTER_S)
    deployment.store.unavailable = False
    await deployment.turns(DEAD_AFTER_S + LEASE_S + 2)
    assert not deployment.holds_claims(killed)


async def test_what_is_more_is_swept_in_the_same_turn_while_others_wait_for_theirs() -> None:
    deployment = Deployment()
    busy = BusyIndex([SweepAnswer(status="more")] * 3, deployment.clock)
    idle = BusyIndex([], deployment.clock)
    deployment.store._indexes.update({ONE: busy, TWO: idle})
    await deployment.start("a", ONE)
    await deployment.start("b", TWO)
    await deployment.keeper.turn()
    assert (busy.num_sweeps, idle.num_sweeps) == (4, 1)


async def test_a_turn_ends_however_much_there_is_to_sweep() -> None:
    """Else the other namespaces would be without a keeper meanwhile, and records unread."""
    deployment = Deployment()
    busy = BusyIndex([SweepAnswer(status="more")] * 1_000, deployment.clock, call_s=KEEPER_PAUSE_S / 4)
    deployment.store._indexes[ONE] = busy
    await deployment.start("a", ONE)
    await deployment.keeper.turn()
    assert busy.num_sweeps == 4


async def test_an_outage_is_told_once_when_it_begins_and_once_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    deployment = Deployment()
    await deployment.start("w")
    await deployment.turns(2)
    deployment.store.unavailable = True
    await deployment.turns(3)
    deployment.store.unavailable = False
    await deployment.turns(3)
    assert [record.message for record in caplog.records] == [
        "the keeper waits for the store: scripted outage",
        "the keeper goes on",
    ]


async def test_one_namespace_that_fails_does_not_keep_the_others_from_being_swept() -> None:
    deployment = Deployment()
    failing = BusyIndex([IndexUnavailable("of this one")] * 100, deployment.clock)
    deployment.store._indexes[ONE] = failing
    await deployment.start("a", ONE)
    dead = await deployment.start("b", TWO)
    deployment.renewed.clear()
    await deployment.turns(DEAD_AFTER_S + LEASE_S + 2)
    assert not deployment.holds_claims(dead)


async def test_run_survives_an_error_that_nobody_thought_of(caplog: pytest.LogCaptureFixture) -> None:
    deployment = Deployment()
    index = BusyIndex([ZeroDivisionError("unthought of")], deployment.clock, call_s=KEEPER_PAUSE_S)
    deployment.store._indexes[ONE] = index
    await deployment.start("w")
    task = asyncio.get_running_loop().create_task(deployment.keeper.run())
    try:
        await eventually(lambda: index.num_sweeps >= 3)
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_a_namespace_whose_workers_left_is_swept_by_keepers_that_never_saw_them() -> None:
    """Workers take leave, and all proxies are started anew before the sweep: only the registry knows the namespace."""
    deployment = Deployment()
    record = await deployment.start("w")
    await deployment.store.registry().withdraw(record)
    deployment.renewed.clear()
    deployment.keeper = Keeper(deployment.store, keeper_id="k2", clock=deployment.clock)
    await deployment.turns(DEAD_AFTER_S + LEASE_S + 2)
    assert not deployment.holds_claims(record)
    assert await deployment.store.registry().namespaces() == {ONE}
    await deployment.turns(RECORD_DEAD_AFTER_S)
    assert await deployment.store.registry().namespaces() == set()
    await deployment.start("w")
    assert await deployment.store.registry().namespaces() == {ONE}


async def test_a_namespace_in_which_nobody_registers_is_kept_clean_too() -> None:
    """Incarnations of plain engines have no record."""
    clock = ManualClock(1_000.0)
    store = MemoryStore(clock=clock)
    keeper = Keeper(store, keeper_id="k1", namespaces=[ONE], clock=clock)
    await keeper.turn()
    dead = (await store.index(ONE).register()).incarnation
    await store.index(ONE).apply(dead, 1, [1, 2], [])
    end_s = clock.now + LEASE_S + KEEPER_S + 2 * DEAD_AFTER_S
    while clock.now < end_s:
        clock.now += KEEPER_PAUSE_S
        await keeper.turn()
    assert not store.index(ONE).held_by(dead)
