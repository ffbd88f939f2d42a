"""The incarnations of all engines: opened, renewed while the engines answer, read for what others did."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from prefixcache.limits import LEASE_S
from proxy.engines.engine_claims import NO_INCARNATION
from proxy.engines.engine_families import EngineFamilies
from proxy.warnings_log import QuietLog
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import FaultyIndex
from tests.support.waiting import eventually

ENGINES = ("e1:8000", "e2:8000")
CHAIN = list(range(1, 11))


class Proxy:
    def __init__(self, index: FaultyIndex, clock: ManualClock) -> None:
        self.families = EngineFamilies(index, QuietLog(logging.getLogger(__name__), clock=clock))
        self.one, self.two = (self.families.claims_of(engine) for engine in ENGINES)
        self.up: Collection[str] = ENGINES

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.families.run(lambda: self.up))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def world() -> tuple[FaultyIndex, ManualClock]:
    clock = ManualClock(100.0)
    return FaultyIndex(clock=clock), clock


async def test_every_engine_gets_one_family_whoever_is_first() -> None:
    index, clock = world()
    here, there = Proxy(index, clock), Proxy(index, clock)
    await asyncio.gather(here.families.exchange(ENGINES), there.families.exchange(ENGINES))
    await asyncio.gather(here.families.exchange(ENGINES), there.families.exchange(ENGINES))
    assert here.one.anchor == there.one.anchor != here.two.anchor == there.two.anchor
    assert here.families.claims_of(ENGINES[0]) is here.one


async def test_only_engines_that_answer_stay_alive() -> None:
    """One that is down is hidden after a lease, and back with its claims if it comes back in time."""
    index, clock = world()
    proxy = Proxy(index, clock)
    await proxy.families.exchange(ENGINES)
    for claims in (proxy.one, proxy.two):
        await index.claim(claims.engine, claims.anchor, CHAIN, capacity=1_000)
    for _ in range(3):
        clock.now += LEASE_S / 2
        await proxy.families.exchange(ENGINES[:1])
    assert (await index.match(CHAIN)).depths == {proxy.one.generations[1]: 10}
    await proxy.families.exchange(ENGINES)
    assert len((await index.match(CHAIN)).depths) == 2


async def test_generations_that_another_proxy_opened_are_known_before_claims_stand_on_them() -> None:
    index, clock = world()
    here, there = Proxy(index, clock), Proxy(index, clock)
    async with here.running():
        for number in range(30):
            await there.families.exchange(ENGINES)
            here.one.claim(
                [number * 100 + block for block in range(20)], capacity_blocks=80, engine_blocks_per_index_block=1.0
            )
            depths: dict[int, int] = {}
            while not depths:
                await asyncio.sleep(0)
                depths = dict((await index.match([number * 100])).depths)
            assert set(depths) <= set(there.one.generations)


async def test_families_are_opened_again_in_an_emptied_store() -> None:
    index, clock = world()
    proxy = Proxy(index, clock)
    async with proxy.running():
        await eventually(lambda: proxy.two.anchor != NO_INCARNATION)
        before = proxy.one.anchor
        index.flush()
        proxy.one.claim(CHAIN, capacity_blocks=None, engine_blocks_per_index_block=4.0)
        await eventually(lambda: proxy.one.anchor not in (NO_INCARNATION, before))
        assert proxy.one.is_reannouncing and proxy.two.is_reannouncing
        proxy.one.claim(CHAIN, capacity_blocks=None, engine_blocks_per_index_block=4.0)
        await eventually(lambda: proxy.one.num_claims == 10)


async def test_what_begins_anew_is_known_to_all_soon() -> None:
    index, clock = world()
    here, there = Proxy(index, clock), Proxy(index, clock)
    async with here.running(), there.running():
        await eventually(lambda: here.one.anchor == there.one.anchor != NO_INCARNATION)
        before = here.one.anchor
        here.one.claim(CHAIN, capacity_blocks=None, engine_blocks_per_index_block=4.0)
        await eventually(lambda: here.one.num_claims == 10)
        here.one.begin_anew()
        await eventually(lambda: here.one.anchor == there.one.anchor not in (before, NO_INCARNATION))
        there.one.begin_anew()
        assert there.one.anchor == here.one.anchor
        assert (await index.match(CHAIN)).depths == {}


async def test_without_an_index_what_was_known_stays_and_comes_back() -> None:
    index, clock = world()
    proxy = Proxy(index, clock)
    async with proxy.running():
        await eventually(lambda: proxy.two.anchor != NO_INCARNATION)
        family = (proxy.one.anchor, proxy.one.generations)
        index.faults.unavailable = True
        num_calls = index.faults.num_calls
        await eventually(lambda: index.faults.num_calls > num_calls + 1)
        assert (proxy.one.anchor, proxy.one.generations) == family
        index.faults.unavailable = False
        proxy.one.claim(CHAIN, capacity_blocks=None, engine_blocks_per_index_block=4.0)
        await eventually(lambda: proxy.one.num_claims == 10)


async def test_an_outage_at_the_beginning_is_waited_for() -> None:
    index, clock = world()
    index.faults.unavailable = True
    proxy = Proxy(index, clock)
    async with proxy.running():
        await eventually(lambda: index.faults.num_calls > 1)
        assert proxy.one.anchor == NO_INCARNATION
        index.faults.unavailable = False
        await eventually(lambda: proxy.one.anchor != NO_INCARNATION)
