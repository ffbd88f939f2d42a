"""What every prefix index does with claims, leases and batches, whatever it is made of."""

from __future__ import annotations

import pytest

from prefixcache.limits import MAX_APPLY_HASHES
from tests.support.index_worlds import World
from tests.support.seeds import seeded

CHAIN = [0x1111111111111111, 0x2222222222222222, 0x3333333333333333, 0x4444444444444444, 0xFFFFFFFFFFFFFFFF]


async def test_empty_index_matches_nothing(world: World) -> None:
    assert (await world.index.match(CHAIN)).depths == {}
    assert (await world.index.match([])).depths == {}


async def test_match_is_the_depth_of_the_deepest_claim(world: World) -> None:
    one = (await world.index.register()).incarnation
    two = (await world.index.register()).incarnation
    await world.index.apply(one, 1, CHAIN[:2], [])
    await world.index.apply(two, 1, CHAIN, [])
    assert (await world.index.match(CHAIN)).depths == {one: 2, two: 5}
    assert (await world.index.match(CHAIN[:1])).depths == {one: 1, two: 1}
    assert (await world.index.match([1, 2, 3])).depths == {}


async def test_lost_claims_before_the_deepest_one_cost_nothing(world: World) -> None:
    one = (await world.index.register()).incarnation
    await world.index.apply(one, 1, [CHAIN[0], CHAIN[3]], [])
    assert (await world.index.match(CHAIN)).depths == {one: 4}


async def test_removed_claims_are_not_matched(world: World) -> None:
    one = (await world.index.register()).incarnation
    await world.index.apply(one, 1, CHAIN, [])
    await world.index.apply(one, 2, [], CHAIN[3:])
    assert (await world.index.match(CHAIN)).depths == {one: 3}
    await world.index.apply(one, 3, [], CHAIN[:3])
    assert (await world.index.match(CHAIN)).depths == {}


async def test_adding_twice_and_removing_nothing_are_no_errors(world: World) -> None:
    one = (await world.index.register()).incarnation
    for batch in (1, 2):
        answer = await world.index.apply(one, batch, [CHAIN[0], CHAIN[0]], [CHAIN[4], CHAIN[4]])
        assert answer.status == "ok"
    assert (await world.index.match(CHAIN)).depths == {one: 1}
    await world.index.apply(one, 3, [], CHAIN[:1])
    assert (await world.index.match(CHAIN)).depths == {}


async def test_hash_both_stored_and_removed_in_one_batch_is_removed(world: World) -> None:
    one = (await world.index.register()).incarnation
    await world.index.apply(one, 1, CHAIN[:2], CHAIN[1:2])
    assert (await world.index.match(CHAIN)).depths == {one: 1}


async def test_resent_batch_is_old_and_changes_nothing(world: World) -> None:
    registration = await world.index.register()
    one = registration.incarnation
    await world.index.apply(one, 1, CHAIN[:2], [])
    answer = await world.index.apply(one, 1, CHAIN[2:], CHAIN[:1])
    assert (answer.status, answer.index_id) == ("old", registration.index_id)
    assert (await world.index.match(CHAIN)).depths == {one: 2}


async def test_batch_after_a_lost_one_is_a_gap_and_changes_nothing(world: World) -> None:
    registration = await world.index.register()
    one = registration.incarnation
    answer = await world.index.apply(one, 2, CHAIN, [])
    assert (answer.status, answer.index_id) == ("gap", registration.index_id)
    assert (await world.index.match(CHAIN)).depths == {}
    assert (await world.index.apply(one, 1, CHAIN[:1], [])).status == "ok"


async def test_unknown_incarnation_is_dead(world: World) -> None:
    registration = await world.index.register()
    answer = await world.index.apply(registration.incarnation + 1, 1, CHAIN, [])
    assert (answer.status, answer.index_id) == ("dead", registration.index_id)
    assert not await world.index.renew(registration.incarnation + 1)
    await world.index.retire(registration.incarnation + 1)
    assert (await world.index.match(CHAIN)).depths == {}


async def test_expired_lease_hides_and_a_renewal_brings_back(world: World) -> None:
    one = (await world.index.register()).incarnation
    two = (await world.index.register()).incarnation
    await world.index.apply(one, 1, CHAIN, [])
    await world.index.apply(two, 1, CHAIN[:1], [])
    world.expire(one)
    assert (await world.index.match(CHAIN)).depths == {two: 1}
    assert (await world.index.apply(one, 2, [], CHAIN[4:])).status == "ok"
    assert await world.index.renew(one)
    assert (await world.index.match(CHAIN)).depths == {one: 4, two: 1}


async def test_retired_incarnation_is_never_matched_again(world: World) -> None:
    one = (await world.index.register()).incarnation
    await world.index.apply(one, 1, CHAIN, [])
    await world.index.retire(one)
    assert (await world.index.match(CHAIN)).depths == {}
    assert not await world.index.renew(one)
    assert (await world.index.apply(one, 2, CHAIN, [])).status == "dead"
    assert (await world.index.match(CHAIN)).depths == {}


async def test_flush_gives_another_index_id_and_kills_every_incarnation(world: World) -> None:
    before = await world.index.register()
    await world.index.apply(before.incarnation, 1, CHAIN, [])
    world.flush()
    assert (await world.index.match(CHAIN)).depths == {}
    assert not await world.index.renew(before.incarnation)
    answer = await world.index.apply(before.incarnation, 2, CHAIN, [])
    assert answer.status == "dead"
    assert answer.index_id != before.index_id
    after = await world.index.register()
    assert after.index_id != before.index_id
    assert (await world.index.match(CHAIN)).depths == {}


async def test_ids_are_never_given_twice(world: World) -> None:
    given: list[int] = []
    for _ in range(3):
        given += [(await world.index.register()).incarnation for _ in range(5)]
        world.flush()
    assert given == sorted(set(given))
    assert 0 < given[0] and given[-1] < 2**30


async def test_one_index_id_as_long_as_the_content_stands(world: World) -> None:
    first, second = await world.index.register(), await world.index.register()
    answer = await world.index.apply(second.incarnation, 1, CHAIN, [])
    assert first.index_id == second.index_id == answer.index_id != ""


async def test_too_many_hashes_in_a_batch_are_refused(world: World) -> None:
    one = (await world.index.register()).incarnation
    with pytest.raises(ValueError, match=f"at most {MAX_APPLY_HASHES}"):
        await world.index.apply(one, 1, range(MAX_APPLY_HASHES), [1])
    assert (await world.index.apply(one, 1, range(MAX_APPLY_HASHES), [])).status == "ok"


@pytest.mark.parametrize("workers", [12, 13, 40])
async def test_block_with_many_holders(world: World, workers: int) -> None:
    """Around the 12 claims that stand in a bucket: a list moves to a key of its own and back under 8."""
    shuffled = seeded("holders")
    incarnations = [(await world.index.register()).incarnation for _ in range(workers)]
    shuffled.shuffle(incarnations)
    for incarnation in incarnations:
        await world.index.apply(incarnation, 1, CHAIN[:1], [])
    assert (await world.index.match(CHAIN)).depths == dict.fromkeys(incarnations, 1)
    shuffled.shuffle(incarnations)
    while incarnations:
        await world.index.apply(incarnations.pop(), 2, [], CHAIN[:1])
        assert (await world.index.match(CHAIN)).depths == dict.fromkeys(incarnations, 1)
        await world.index.check_integrity()
