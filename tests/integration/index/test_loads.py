"""What every prefix index does with load."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefixcache.limits import KEEPER_S, LOAD_RECORD_S, MATCH_LOADS
from prefixcache.load import IncarnationLoad, ProxyLoad, WorkerLoad
from tests.support.index_commits import PROXY_ONE, PROXY_TWO, commit_of
from tests.support.index_worlds import World
from tests.support.waiting import eventually

CHAIN = [0x0101010101010101 * number for number in range(1, 21)]
LEASE_S = 10_000.0
"""Longer than any time that a test lets pass."""


@pytest.fixture
def lease_s() -> float:
    return LEASE_S


def proxy_load(version: int, running: int = 0) -> ProxyLoad:
    return ProxyLoad(version=version, running=running, waiting_s=(0.0, 0.5, 0.0, 2.0, 0.0))


def worker_load(version: int, available_blocks: int = 1) -> WorkerLoad:
    return WorkerLoad(
        version=version,
        rest_s=0.0,
        prefill_rate=4_096.0,
        inter_token_latency_s=0.25,
        available_blocks=available_blocks,
        oldest_age_s=2.0,
        is_draining=True,
    )


async def registered(world: World, number: int) -> list[int]:
    return [(await world.index.register()).incarnation for _ in range(number)]


async def loads(world: World, incarnations: Sequence[int]) -> dict[int, IncarnationLoad]:
    return dict(await world.index.exchange_loads(PROXY_ONE, {}, incarnations))


async def running(world: World, incarnation: int) -> dict[str, int]:
    """Of each proxy that counts."""
    found = (await loads(world, [incarnation])).get(incarnation, IncarnationLoad())
    return {proxy_id: load.running for proxy_id, load in found.proxies.items()}


async def test_nobody_has_a_load_at_first(world: World) -> None:
    one, two = await registered(world, 2)
    await world.index.apply(one, 1, CHAIN, [])
    assert await loads(world, [one, two, 99]) == {}
    assert await loads(world, []) == {}
    assert (await world.index.match(CHAIN, candidates=[two])).loads == {}


async def test_exchange_writes_first_and_reads_whom_it_asks_for(world: World) -> None:
    one, two, three = await registered(world, 3)
    own = {one: proxy_load(1, 4), two: proxy_load(1, 5)}
    answer = await world.index.exchange_loads(PROXY_ONE, own, [two, three])
    assert answer == {two: IncarnationLoad(proxies={PROXY_ONE: own[two]})}
    assert await loads(world, [one]) == {one: IncarnationLoad(proxies={PROXY_ONE: own[one]})}


async def test_worker_and_proxies_stand_side_by_side(world: World) -> None:
    (one,) = await registered(world, 1)
    assert await world.index.renew(one, worker_load(1, 77))
    await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(1, 4)}, [])
    await world.index.commit(commit_of("place", 1, CHAIN, one, proxy_id=PROXY_TWO, load=proxy_load(9, 5)))
    assert await loads(world, [one]) == {
        one: IncarnationLoad(
            worker=worker_load(1, 77), proxies={PROXY_ONE: proxy_load(1, 4), PROXY_TWO: proxy_load(9, 5)}
        )
    }


@pytest.mark.parametrize("verb", ["place", "settle", "release"])
async def test_every_commit_carries_the_load_of_its_proxy(world: World, verb: str) -> None:
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of(verb, 1, CHAIN, one, load=proxy_load(1, 3)))  # type: ignore[arg-type]  # parametrized
    assert await running(world, one) == {PROXY_ONE: 3}


async def test_a_record_that_comes_late_never_replaces_a_newer_one(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one, load=proxy_load(5, 50)))
    await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(4, 40)}, [])
    assert await running(world, one) == {PROXY_ONE: 50}
    await world.index.commit(commit_of("place", 2, CHAIN, one, load=proxy_load(5, 51)))
    assert await running(world, one) == {PROXY_ONE: 50}
    assert dict((await world.index.match(CHAIN)).pending) == {one: 20}
    await world.index.commit(commit_of("place", 2, CHAIN, one, load=proxy_load(6, 60)))
    assert await running(world, one) == {PROXY_ONE: 60}


async def test_versions_are_compared_as_numbers_and_of_one_writer_each(world: World) -> None:
    (one,) = await registered(world, 1)
    for version in (9, 10, 2**31, 2**32 + 1, 2**53 - 1):
        await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(version, version % 7)}, [])
        assert await running(world, one) == {PROXY_ONE: version % 7}
    await world.index.exchange_loads(PROXY_TWO, {one: proxy_load(0, 1)}, [])
    await world.index.renew(one, worker_load(0))
    load = (await loads(world, [one]))[one]
    assert (set(load.proxies), load.worker) == ({PROXY_ONE, PROXY_TWO}, worker_load(0))
    assert load.proxies[PROXY_ONE].version == 2**53 - 1


async def test_a_worker_record_that_comes_late_still_renews_the_lease(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.apply(one, 1, CHAIN, [])
    await world.index.renew(one, worker_load(5, 50))
    world.expire(one)
    assert await world.index.renew(one, worker_load(4, 40))
    assert (await world.index.match(CHAIN)).loads == {one: IncarnationLoad(worker=worker_load(5, 50))}


async def test_a_renewal_without_load_leaves_the_one_that_stands(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.renew(one, worker_load(5, 50))
    assert await world.index.renew(one)
    assert await loads(world, [one]) == {one: IncarnationLoad(worker=worker_load(5, 50))}


async def test_a_record_counts_for_three_seconds_and_then_any_version_may_follow(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(7, 1)}, [])
    await world.index.renew(one, worker_load(7))
    world.let_pass(LOAD_RECORD_S / 2)
    await world.index.exchange_loads(PROXY_TWO, {one: proxy_load(1, 2)}, [])
    assert await running(world, one) == {PROXY_ONE: 1, PROXY_TWO: 2}
    world.let_pass(LOAD_RECORD_S / 2)
    assert (await loads(world, [one]))[one].worker is None
    assert await running(world, one) == {PROXY_TWO: 2}
    await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(1, 3)}, [])
    await world.index.renew(one, worker_load(1, 9))
    assert await running(world, one) == {PROXY_ONE: 3, PROXY_TWO: 2}
    assert (await loads(world, [one]))[one].worker == worker_load(1, 9)
    world.let_pass(LOAD_RECORD_S)
    assert await loads(world, [one]) == {}


async def test_records_run_out_by_themselves(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.renew(one, worker_load(1))
    world.let_pass(LOAD_RECORD_S - 0.1)

    async def is_gone() -> bool:
        return await loads(world, [one]) == {}

    await eventually(is_gone)


async def test_what_has_started_is_counted_down(world: World) -> None:
    (one,) = await registered(world, 1)
    load = ProxyLoad(version=1, running=1, prefilling_s=2.0, waiting_s=(0.0, 0.0, 8.0, 0.0, 0.0))
    await world.index.exchange_loads(PROXY_ONE, {one: load}, [])
    world.let_pass(1)
    found = (await loads(world, [one]))[one].proxies[PROXY_ONE]
    assert 0.0 <= found.prefilling_s <= 1.01
    assert found.waiting_s == load.waiting_s


async def test_match_brings_the_load_of_holders_and_of_candidates(world: World) -> None:
    holder, candidate, other = await registered(world, 3)
    await world.index.apply(holder, 1, CHAIN, [])
    for incarnation in (holder, candidate, other):
        await world.index.renew(incarnation, worker_load(1))
    assert set((await world.index.match(CHAIN)).loads) == {holder}
    assert set((await world.index.match(CHAIN, candidates=[candidate])).loads) == {holder, candidate}
    assert set((await world.index.match(CHAIN, candidates=[holder, candidate])).loads) == {holder, candidate}
    assert set((await world.index.match([], candidates=[candidate, 99])).loads) == {candidate}


async def test_match_brings_the_load_of_the_deepest_holders(world: World) -> None:
    incarnations = await registered(world, MATCH_LOADS + 4)
    for number, incarnation in enumerate(incarnations):
        await world.index.apply(incarnation, 1, CHAIN[: number + 1], [])
        await world.index.renew(incarnation, worker_load(1))
    match = await world.index.match(CHAIN)
    assert match.depths == {incarnation: number + 1 for number, incarnation in enumerate(incarnations)}
    assert set(match.loads) == set(incarnations[-MATCH_LOADS:])
    world.expire(incarnations[-1])
    match = await world.index.match(CHAIN, candidates=incarnations[:2])
    assert set(match.loads) == {*incarnations[:2], *incarnations[-MATCH_LOADS - 1 : -1]}


async def test_of_equal_holders_those_with_the_least_ids(world: World) -> None:
    incarnations = await registered(world, MATCH_LOADS + 4)
    for incarnation in incarnations:
        await world.index.apply(incarnation, 1, CHAIN, [])
        await world.index.renew(incarnation, worker_load(1))
    assert set((await world.index.match(CHAIN)).loads) == set(incarnations[:MATCH_LOADS])


async def test_more_candidates_than_a_match_takes_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match=f"at most {MATCH_LOADS}"):
        await world.index.match(CHAIN, candidates=range(1, MATCH_LOADS + 2))


async def test_load_goes_with_a_retired_incarnation_and_does_not_come_back(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.renew(one, worker_load(1))
    await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(1)}, [])
    await world.index.retire(one)
    assert await loads(world, [one]) == {}
    await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(2), 99: proxy_load(2)}, [])
    await world.index.commit(commit_of("place", 1, CHAIN, one, load=proxy_load(3)))
    assert not await world.index.renew(one, worker_load(4))
    assert await loads(world, [one, 99]) == {}


async def test_load_goes_with_an_incarnation_that_the_keeper_found_dead(world: World) -> None:
    (one,) = await registered(world, 1)
    world.expire(one)
    while not (await world.index.sweep("k")).dead_incarnations:
        world.let_pass(KEEPER_S - 1)
        await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(1)}, [])
    assert await loads(world, [one]) == {}


async def test_an_expired_lease_hides_no_load(world: World) -> None:
    """A proxy may ask for the load of a worker that it still streams from."""
    (one,) = await registered(world, 1)
    world.expire(one)
    await world.index.exchange_loads(PROXY_ONE, {one: proxy_load(1, 6)}, [])
    assert await running(world, one) == {PROXY_ONE: 6}


async def test_loads_of_many_incarnations_in_one_call(world: World) -> None:
    incarnations = await registered(world, 300)
    own = {incarnation: proxy_load(1, number) for number, incarnation in enumerate(incarnations)}
    answer = await world.index.exchange_loads(PROXY_ONE, own, incarnations)
    assert answer == {i: IncarnationLoad(proxies={PROXY_ONE: load}) for i, load in own.items()}


async def test_more_incarnations_than_one_command_takes(world: World) -> None:
    first, *_, last = await registered(world, 3)
    own = dict.fromkeys([first, *range(10**6, 10**6 + 9_000), last], proxy_load(1, 7))
    answer = await world.index.exchange_loads(PROXY_ONE, own, [*own])
    assert answer == {i: IncarnationLoad(proxies={PROXY_ONE: own[i]}) for i in (first, last)}


async def test_flush_forgets_load(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.renew(one, worker_load(1))
    world.flush()
    assert await loads(world, [one]) == {}
