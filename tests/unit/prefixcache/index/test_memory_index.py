"""MemoryIndex against plain sets and lists, and what it notices of itself.

What every index does is tested in tests/integration/index.
"""

from __future__ import annotations

import pytest

from prefixcache.errors import IntegrityError
from prefixcache.index.memory_index import MemoryIndex
from prefixcache.limits import LOAD_RECORD_S, PENDING_S
from prefixcache.load import ProxyLoad
from tests.support.index_commits import PROXY_ONE, commit_of
from tests.support.index_history import TICK_S
from tests.support.index_machine import IndexMachine, run_machine
from tests.support.index_worlds import MemoryWorld, World
from tests.support.manual_clock import ManualClock
from tests.support.plain_index import PlainWorld

LEASE_S = 5.0
BLOCKS = [11, 12, 13]


class MemoryMachine(IndexMachine):
    """Leases run out by the clock, too: one survives two ticks of a history."""

    def open_worlds(self) -> tuple[World, tuple[World, World]]:
        clock = ManualClock(100.0)
        plain = PlainWorld(clock, 3 * TICK_S)
        return MemoryWorld(clock=clock, lease_s=3 * TICK_S), (plain, plain)


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
    assert (await index.match(BLOCKS)).depths == {one: 3}
    assert index.is_live(one)
    clock.now = 105.0
    assert (await index.match(BLOCKS)).depths == {}
    assert not index.is_live(one)
    assert index.held_by(one) == frozenset(BLOCKS)
    assert await index.renew(one)
    assert (await index.match(BLOCKS)).depths == {one: 3}
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
    family = await index.open_family("engine")
    await index.claim("engine", family.anchor, BLOCKS, capacity=8)
    await index.check_integrity()
    if what == "claim lost":
        index._held[one].discard(BLOCKS[0])
    elif what == "claim invented":
        index._holders[99] = {one}
    elif what == "empty block kept":
        index._holders[99] = set()
    elif what == "empty pending kept":
        index._pending[99] = {}
    elif what == "load kept":
        index._loads[99] = {}
    elif what == "two claims of one engine":
        index._families["engine"].append(one)
    elif what == "anchor with claims":
        index._families["engine"][0] = one
    else:
        del index._batches[one]
    return index


@pytest.mark.parametrize(
    "what",
    [
        "claim lost",
        "claim invented",
        "empty block kept",
        "empty pending kept",
        "load kept",
        "batch number lost",
        "two claims of one engine",
        "anchor with claims",
    ],
)
async def test_damage_is_found(what: str) -> None:
    with pytest.raises(IntegrityError):
        await (await _damaged(what)).check_integrity()


async def test_more_claims_than_a_pool_holds_are_found() -> None:
    index = MemoryIndex()
    one = (await index.register()).incarnation
    await index.apply(one, 1, BLOCKS, [])
    await index.check_integrity({one: len(BLOCKS), 99: 0})
    with pytest.raises(IntegrityError, match="claims 3 blocks, its pool holds 2"):
        await index.check_integrity({one: 2})


async def test_pending_claims_take_no_memory_once_they_expired() -> None:
    clock = ManualClock(100.0)
    index = MemoryIndex(clock=clock, lease_s=1e6)
    one = (await index.register()).incarnation
    for number in range(50):
        clock.now += 10
        index.post(commit_of("place", number, [number, 1_000 + number], one))
    index.post(commit_of("settle", 49, [49, 1_049], one))
    assert len(index._pending) == 2 * PENDING_S / 10
    clock.now += PENDING_S
    index.post(commit_of("release", 1, [], one))
    assert index._pending == {}


async def test_records_of_proxies_that_are_gone_take_no_memory() -> None:
    clock = ManualClock(100.0)
    index = MemoryIndex(clock=clock, lease_s=1e6)
    one = (await index.register()).incarnation
    for number in range(1, 51):
        clock.now += 1
        await index.exchange_loads(f"{number:016x}", {one: ProxyLoad(version=1)}, [])
    assert len(index._loads[one]) == LOAD_RECORD_S
    await index.retire(one)
    assert index._loads == {}


async def test_calls_never_wait() -> None:
    """Each ends without giving way to another task, so that callers on one loop see whole calls only."""
    index = MemoryIndex()
    one = (await index.register()).incarnation
    for call in (
        index.open_family("engine"),
        index.families(["engine"], renew=["engine"]),
        index.claim("engine", one + 1, BLOCKS, capacity=1),
        index.apply(one, 1, BLOCKS, []),
        index.match(BLOCKS),
        index.commit(commit_of("place", 1, BLOCKS, one)),
        index.exchange_loads(PROXY_ONE, {}, [one]),
        index.sweep("k"),
        index.renew(one),
        index.retire(one),
    ):
        with pytest.raises(StopIteration):
            call.send(None)
