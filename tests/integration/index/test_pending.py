"""What every prefix index does with pending claims."""

from __future__ import annotations

import pytest

from prefixcache.index.base import MOST_PENDING, Commit
from prefixcache.index.boundaries import Boundaries
from prefixcache.limits import DEAD_AFTER_S, KEEPER_S, PENDING_S, PENDING_SETTLED_S
from prefixcache.load import ProxyLoad
from tests.support.index_commits import PROXY_ONE, commit_of
from tests.support.index_worlds import World
from tests.support.waiting import eventually

CHAIN = [0x0101010101010101 * number for number in range(1, 21)]
"""Boundaries at 1, 2, 3, 4, 6, 8, 12, 16 and 20."""
FORK = [*CHAIN[:10], *range(1, 40)]
"""Shares 10 blocks, and so the boundary at 8."""
UNRELATED = [*range(100, 120)]
LEASE_S = 10_000.0
"""Longer than any time that a test lets pass."""


@pytest.fixture
def lease_s() -> float:
    return LEASE_S


async def registered(world: World, number: int) -> list[int]:
    return [(await world.index.register()).incarnation for _ in range(number)]


async def pending(world: World, chain: list[int]) -> dict[int, int]:
    return dict((await world.index.match(chain)).pending)


async def test_a_placed_request_is_pending_as_deep_as_the_prompts_are_equal(world: World) -> None:
    (one,) = await registered(world, 1)
    assert await world.index.commit(commit_of("place", 1, CHAIN, one)) == {}
    assert await pending(world, CHAIN) == {one: 20}
    assert await pending(world, FORK) == {one: 8}
    assert await pending(world, CHAIN[:7]) == {one: 7}
    assert await pending(world, [*CHAIN, 1, 2, 3]) == {one: 16}
    assert await pending(world, UNRELATED) == {}
    assert (await world.index.match(CHAIN)).depths == {}


async def test_a_later_commit_is_told_what_others_have_pending(world: World) -> None:
    one, two = await registered(world, 2)
    assert await world.index.commit(commit_of("place", 1, CHAIN, one)) == {}
    assert await world.index.commit(commit_of("place", 2, CHAIN, two)) == {one: 20}
    assert await world.index.commit(commit_of("place", 3, FORK, one)) == {one: 8, two: 8}
    assert await world.index.commit(commit_of("place", 4, UNRELATED, one)) == {}


async def test_a_commit_is_not_told_of_its_own_request(world: World) -> None:
    one, two = await registered(world, 2)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    assert await world.index.commit(commit_of("place", 1, CHAIN, one)) == {}
    assert await world.index.commit(commit_of("place", 1, CHAIN, two)) == {}
    assert await world.index.commit(commit_of("settle", 1, CHAIN, two)) == {}


async def test_a_second_request_on_the_same_incarnation_takes_over(world: World) -> None:
    """The first one's end leaves the second one's claims as they are."""
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    assert await world.index.commit(commit_of("place", 2, CHAIN, one)) == {one: 20}
    await world.index.commit(commit_of("release", 1, CHAIN, one))
    assert await pending(world, CHAIN) == {one: 20}
    await world.index.commit(commit_of("settle", 1, CHAIN, one))
    world.let_pass(PENDING_SETTLED_S + 1)
    assert await pending(world, CHAIN) == {one: 20}
    await world.index.commit(commit_of("release", 2, CHAIN, one))
    assert await pending(world, CHAIN) == {}


async def test_a_fork_takes_over_the_shared_boundaries_alone(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    await world.index.commit(commit_of("place", 2, FORK, one))
    await world.index.commit(commit_of("release", 2, FORK, one))
    assert await pending(world, CHAIN) == {one: 20}
    assert await pending(world, FORK) == {}


async def test_a_moved_request_is_pending_where_it_is_now(world: World) -> None:
    one, two = await registered(world, 2)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    await world.index.commit(commit_of("place", 1, CHAIN, two))
    assert await pending(world, CHAIN) == {two: 20}
    await world.index.commit(commit_of("release", 1, CHAIN, one))
    assert await pending(world, CHAIN) == {two: 20}


async def test_a_move_leaves_what_others_have_there(world: World) -> None:
    one, two = await registered(world, 2)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    await world.index.commit(commit_of("place", 2, CHAIN, two))
    await world.index.commit(commit_of("place", 1, CHAIN, two))
    assert await pending(world, CHAIN) == {two: 20}
    await world.index.commit(commit_of("place", 3, CHAIN, one))
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    assert await pending(world, CHAIN) == {one: 20}


async def test_settled_claims_stay_for_a_short_while(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    await world.index.commit(commit_of("settle", 1, CHAIN, one))
    world.let_pass(PENDING_SETTLED_S / 2)
    assert await pending(world, CHAIN) == {one: 20}
    await world.index.commit(commit_of("settle", 1, CHAIN, one))
    world.let_pass(PENDING_SETTLED_S / 2)
    assert await pending(world, CHAIN) == {}
    await world.index.commit(commit_of("settle", 1, CHAIN, one))
    assert await pending(world, CHAIN) == {}


async def test_claims_of_a_request_that_never_ended_expire(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    world.let_pass(PENDING_S - 1)
    assert await pending(world, CHAIN) == {one: 20}
    assert await world.index.commit(commit_of("place", 2, CHAIN[:1], one)) == {one: 1}
    world.let_pass(1)
    assert await pending(world, CHAIN) == {one: 1}
    assert await world.index.commit(commit_of("place", 3, CHAIN, one)) == {one: 1}


async def test_placing_again_begins_the_time_anew(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    world.let_pass(PENDING_S - 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    world.let_pass(PENDING_S - 1)
    assert await pending(world, CHAIN) == {one: 20}


async def test_a_fifth_incarnation_replaces_the_one_that_ends_first(world: World) -> None:
    incarnations = await registered(world, MOST_PENDING + 2)
    first, second, third, fourth, fifth, sixth = incarnations
    for request, incarnation in enumerate(incarnations[:MOST_PENDING]):
        await world.index.commit(commit_of("place", request, CHAIN, incarnation))
        world.let_pass(1)
    await world.index.commit(commit_of("settle", 2, CHAIN, third))
    assert await world.index.commit(commit_of("place", 5, CHAIN, fifth)) == dict.fromkeys(incarnations[:4], 20)
    assert await pending(world, CHAIN) == dict.fromkeys((first, second, fourth, fifth), 20)
    await world.index.commit(commit_of("place", 6, CHAIN, sixth))
    assert await pending(world, CHAIN) == dict.fromkeys((second, fourth, fifth, sixth), 20)


async def test_the_four_are_counted_at_each_boundary(world: World) -> None:
    incarnations = await registered(world, MOST_PENDING + 1)
    for request, incarnation in enumerate(incarnations[:MOST_PENDING]):
        await world.index.commit(commit_of("place", request, CHAIN[: request + 1], incarnation))
        world.let_pass(1)
    await world.index.commit(commit_of("place", 5, CHAIN, incarnations[4]))
    assert await pending(world, CHAIN) == dict(zip(incarnations[1:], (2, 3, 4, 20), strict=True))


async def test_taking_over_needs_no_place_of_its_own(world: World) -> None:
    incarnations = await registered(world, MOST_PENDING)
    for request, incarnation in enumerate(incarnations):
        await world.index.commit(commit_of("place", request, CHAIN, incarnation))
    await world.index.commit(commit_of("place", 9, CHAIN, incarnations[2]))
    assert await pending(world, CHAIN) == dict.fromkeys(incarnations, 20)


async def test_an_incarnation_without_a_live_lease_is_ignored(world: World) -> None:
    one, two = await registered(world, 2)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    world.expire(one)
    assert await pending(world, CHAIN) == {}
    assert await world.index.commit(commit_of("place", 2, CHAIN, two)) == {}
    await world.index.renew(one)
    assert await pending(world, CHAIN) == {one: 20, two: 20}
    await world.index.retire(one)
    assert await pending(world, CHAIN) == {two: 20}
    assert await world.index.commit(commit_of("place", 3, CHAIN, one)) == {two: 20}
    assert await pending(world, CHAIN) == {two: 20}


async def test_those_that_are_gone_give_way_first(world: World) -> None:
    gone, *others = await registered(world, MOST_PENDING + 1)
    for request, incarnation in enumerate(others[:-1]):
        await world.index.commit(commit_of("place", request, CHAIN, incarnation))
    world.let_pass(1)
    await world.index.commit(commit_of("place", 8, CHAIN, gone))
    await world.index.retire(gone)
    await world.index.commit(commit_of("place", 9, CHAIN, others[-1]))
    assert await pending(world, CHAIN) == dict.fromkeys(others, 20)


async def test_one_that_is_gone_takes_no_place(world: World) -> None:
    gone, *others = await registered(world, MOST_PENDING + 1)
    await world.index.retire(gone)
    for request, incarnation in enumerate(others):
        await world.index.commit(commit_of("place", request, CHAIN, incarnation))
    assert await world.index.commit(commit_of("place", 9, CHAIN, gone)) == dict.fromkeys(others, 20)
    assert await pending(world, CHAIN) == dict.fromkeys(others, 20)
    await world.index.commit(commit_of("place", 0, CHAIN, gone))
    assert await pending(world, CHAIN) == dict.fromkeys(others[1:], 20), "moved away from where it was"


async def test_a_swept_incarnation_has_nothing_pending(world: World) -> None:
    (one,) = await registered(world, 1)
    world.expire(one)
    for _ in range(round(DEAD_AFTER_S / (KEEPER_S - 1)) + 2):
        await world.index.sweep("k")
        world.let_pass(KEEPER_S - 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    assert await pending(world, CHAIN) == {}
    assert not await world.index.renew(one)


async def test_posts_are_done_in_their_order(world: World) -> None:
    one, two = await registered(world, 2)
    world.index.post(commit_of("place", 1, CHAIN, one))
    world.index.post(commit_of("place", 2, UNRELATED, one))
    world.index.post(commit_of("place", 1, CHAIN, two))
    world.index.post(commit_of("release", 2, UNRELATED, one))
    assert await pending(world, CHAIN) == {two: 20}
    assert await pending(world, UNRELATED) == {}


async def test_a_prompt_without_a_full_block_commits_its_load_alone(world: World) -> None:
    (one,) = await registered(world, 1)
    assert await world.index.commit(commit_of("place", 1, [], one, load=ProxyLoad(version=1, running=1))) == {}
    match = await world.index.match([], candidates=[one])
    assert match.loads[one].proxies[PROXY_ONE].running == 1


async def test_flush_forgets_pending_claims(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    world.flush()
    await registered(world, 2)
    assert await pending(world, CHAIN) == {}


async def test_claims_run_out_by_themselves(world: World) -> None:
    (one,) = await registered(world, 1)
    await world.index.commit(commit_of("place", 1, CHAIN, one))
    world.let_pass(PENDING_S - 0.1)

    async def is_gone() -> bool:
        return await pending(world, CHAIN) == {}

    await eventually(is_gone)


@pytest.mark.parametrize("length", [0, 11, 13])
def test_a_request_id_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes"):
        Commit(
            verb="place",
            request_id=bytes(length),
            boundaries=Boundaries.of(CHAIN),
            incarnation=1,
            proxy_id=PROXY_ONE,
            load=ProxyLoad(version=1),
        )
