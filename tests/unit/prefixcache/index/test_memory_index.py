"""MemoryIndex against one plain set of claims, and what it notices of itself.

What every index does is tested in tests/integration/index/test_behaviour.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from prefixcache.errors import IntegrityError
from prefixcache.index.base import ApplyAnswer, PrefixIndex, Registration
from prefixcache.index.memory_index import MemoryIndex
from tests.support.index_machine import CHAINS, IndexMachine, run_machine
from tests.support.index_worlds import MemoryWorld, World
from tests.support.manual_clock import ManualClock

LEASE_S = 5.0
BLOCKS = [11, 12, 13]


class PlainIndex(PrefixIndex):
    """Claims that were ever accepted in one set; nothing is looked up faster than by going through all of it."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.num_contents = 0
        self.num_given = 0
        self.lease_ends: dict[int, float] = {}
        self.accepted: dict[int, int] = {}
        self.claims: set[tuple[int, int]] = set()

    async def register(self) -> Registration:
        self.num_given += 1
        self.lease_ends[self.num_given] = self.clock() + LEASE_S
        return Registration(incarnation=self.num_given, index_id=str(self.num_contents))

    async def renew(self, incarnation: int) -> bool:
        if incarnation in self.lease_ends:
            self.lease_ends[incarnation] = self.clock() + LEASE_S
        return incarnation in self.lease_ends

    async def retire(self, incarnation: int) -> None:
        self.lease_ends.pop(incarnation, None)

    async def match(self, hashes: Sequence[int]) -> Mapping[int, int]:
        live = {incarnation for incarnation, end in self.lease_ends.items() if end > self.clock()}
        held = {incarnation: [block for block in hashes if (incarnation, block) in self.claims] for incarnation in live}
        return {incarnation: hashes.index(blocks[-1]) + 1 for incarnation, blocks in held.items() if blocks}

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        index_id = str(self.num_contents)
        if incarnation not in self.lease_ends:
            return ApplyAnswer(status="dead", index_id=index_id)
        expected = self.accepted.get(incarnation, 0) + 1
        if batch > expected:
            return ApplyAnswer(status="gap", index_id=index_id)
        if batch < expected:
            return ApplyAnswer(status="old", index_id=index_id)
        self.accepted[incarnation] = batch
        self.claims |= {(incarnation, block) for block in stored}
        self.claims -= {(incarnation, block) for block in removed}
        return ApplyAnswer(status="ok", index_id=index_id)

    async def check_integrity(self) -> None:
        assert self.claims <= {(incarnation, block) for incarnation in self.accepted for _, block in self.claims}


class PlainWorld:
    name = "plain"

    def __init__(self, clock: ManualClock) -> None:
        self.index = PlainIndex(clock)

    def expire(self, incarnation: int) -> None:
        self.index.lease_ends[incarnation] = self.index.clock()

    def flush(self) -> None:
        self.index.num_contents += 1
        self.index.lease_ends.clear()
        self.index.accepted.clear()
        self.index.claims.clear()


class MemoryMachine(IndexMachine):
    """Time passes, too: leases run out by the clock."""

    def open_worlds(self) -> tuple[World, World]:
        self.clock = ManualClock(100.0)
        return MemoryWorld(clock=self.clock, lease_s=LEASE_S), PlainWorld(self.clock)

    @rule(passed_s=st.sampled_from([0.0, 1.0, LEASE_S / 2, LEASE_S, 2 * LEASE_S]), chain=CHAINS)
    def time_passes(self, passed_s: float, chain: list[int]) -> None:
        self.clock.now += passed_s
        self.compare(chain)


class MemoryMachineOf40(MemoryMachine):
    num_writers = 40


@pytest.mark.parametrize("machine", [MemoryMachine, MemoryMachineOf40], ids=["8", "40"])
def test_memory_answers_as_plain_sets(machine: type[IndexMachine]) -> None:
    run_machine(machine, f"{machine.num_writers} writers in memory")


async def test_lease_ends_at_its_second_and_not_before() -> None:
    clock = ManualClock(100.0)
    index = MemoryIndex(clock=clock, lease_s=LEASE_S)
    one = (await index.register()).incarnation
    await index.apply(one, 1, BLOCKS, [])
    clock.now = 104.999
    assert await index.match(BLOCKS) == {one: 3}
    assert index.is_live(one)
    clock.now = 105.0
    assert await index.match(BLOCKS) == {}
    assert not index.is_live(one)
    assert index.held_by(one) == frozenset(BLOCKS)
    assert await index.renew(one)
    assert await index.match(BLOCKS) == {one: 3}
    await index.check_integrity()


async def test_nothing_is_kept_of_a_retired_incarnation() -> None:
    index = MemoryIndex()
    one, two = (await index.register()).incarnation, (await index.register()).incarnation
    await index.apply(one, 1, BLOCKS, [])
    await index.apply(two, 1, BLOCKS[:1], [])
    await index.retire(one)
    assert index.held_by(one) == frozenset()
    assert index.held_by(two) == {BLOCKS[0]}
    assert index._holders == {BLOCKS[0]: {two}}
    await index.check_integrity()


async def _damaged(what: str) -> MemoryIndex:
    index = MemoryIndex()
    one = (await index.register()).incarnation
    await index.apply(one, 1, BLOCKS, [])
    if what == "claim lost":
        index._held[one].discard(BLOCKS[0])
    elif what == "claim invented":
        index._holders[99] = {one}
    elif what == "empty block kept":
        index._holders[99] = set()
    else:
        del index._batches[one]
    return index


@pytest.mark.parametrize("what", ["claim lost", "claim invented", "empty block kept", "batch number lost"])
async def test_damage_is_found(what: str) -> None:
    with pytest.raises(IntegrityError):
        await (await _damaged(what)).check_integrity()


async def test_calls_never_wait() -> None:
    """Each ends without giving way to another task, so that callers on one loop see whole calls only."""
    index = MemoryIndex()
    one = (await index.register()).incarnation
    for call in (index.apply(one, 1, BLOCKS, []), index.match(BLOCKS), index.renew(one), index.retire(one)):
        with pytest.raises(StopIteration):
            call.send(None)
