"""What every prefix index does with the families of plain engines, whatever it is made of."""

from __future__ import annotations

import asyncio
import random

import pytest

from prefixcache.index.base import PrefixIndex
from prefixcache.index.family import GENERATIONS_A_CACHE, MOST_GENERATIONS, Family
from prefixcache.index.keys import INLINE_CLAIMS
from prefixcache.limits import DEAD_AFTER_S, KEEPER_S, MAX_APPLY_HASHES
from prefixcache.load import ProxyLoad
from tests.integration.index.worlds import KEYS, redis_world
from tests.support.chat_chains import chats
from tests.support.index_commits import PROXY_ONE, commit_of
from tests.support.index_worlds import World
from tests.support.lru_blocks import LruBlocks
from tests.support.seeds import seeded
from tests.support.valkey import Server

ENGINE = "10.0.0.1:8000"
OTHER = "[::1]:8001/base"
CHAIN = [0x1111111111111111, 0x2222222222222222, 0x3333333333333333, 0x4444444444444444, 0xFFFFFFFFFFFFFFFF]
CAPACITY = 40


def new_blocks(number: int, seed: int = 0) -> list[int]:
    rand = random.Random(f"{seed} {number}")
    return [rand.getrandbits(64) for _ in range(number)]


async def depth_of(index: PrefixIndex, family: Family, chain: list[int]) -> int:
    """As a proxy sees it: the deepest one of the engine's generations."""
    depths = (await index.match(chain)).depths
    assert family.anchor not in depths
    return max((depths.get(generation, 0) for generation in family.generations), default=0)


async def claimed(index: PrefixIndex, engine: str, anchor: int, chain: list[int], capacity: int = CAPACITY) -> Family:
    family = await index.claim(engine, anchor, chain, capacity=capacity)
    assert family is not None and family.anchor == anchor
    return family


async def claim_long(index: PrefixIndex, engine: str, anchor: int, chain: list[int], capacity: int) -> None:
    for start in range((len(chain) - 1) // MAX_APPLY_HASHES * MAX_APPLY_HASHES, -1, -MAX_APPLY_HASHES):
        await claimed(index, engine, anchor, chain[start : start + MAX_APPLY_HASHES], capacity)


# --- opening


async def test_new_family_has_an_anchor_and_two_empty_generations(world: World) -> None:
    family = await world.index.open_family(ENGINE)
    assert len({family.anchor, *family.generations}) == 3
    assert list(family.generations) == sorted(family.generations, reverse=True)
    assert family.num_claims == 0
    assert await world.index.families([ENGINE, OTHER]) == {ENGINE: family}


async def test_who_opens_second_gets_the_standing_family(world: World) -> None:
    opened = await asyncio.gather(*(world.index.open_family(ENGINE) for _ in range(5)))
    assert len(set(opened)) == 1
    other = await world.index.open_family(OTHER)
    assert not {other.anchor, *other.generations} & {opened[0].anchor, *opened[0].generations}


async def test_of_several_that_begin_anew_the_first_one_does(world: World) -> None:
    """Each names the anchor that it knew."""
    old = await world.index.open_family(ENGINE)
    await claimed(world.index, ENGINE, old.anchor, CHAIN)
    await world.index.commit(commit_of("place", 1, CHAIN, old.anchor))
    begun = await asyncio.gather(*(world.index.open_family(ENGINE, instead_of=old.anchor) for _ in range(5)))
    assert len(set(begun)) == 1 and begun[0].anchor > max(old.generations)
    match = await world.index.match(CHAIN)
    assert (match.depths, match.pending) == ({}, {})
    assert not await world.index.renew(old.anchor)
    assert await world.index.families([ENGINE]) == {ENGINE: begun[0]}
    assert await world.index.claim(ENGINE, old.anchor, CHAIN, capacity=CAPACITY) is None
    assert (await world.index.match(CHAIN)).depths == {}


async def test_ids_of_workers_and_engines_are_never_the_same(world: World) -> None:
    given: list[int] = []
    for number in range(5):
        given.append((await world.index.register()).incarnation)
        family = await world.index.open_family(f"engine {number}")
        given += [family.anchor, *reversed(family.generations)]
    assert given == sorted(set(given))


# --- claiming


async def test_claims_of_an_engine_are_matched_as_deep_as_they_reach(world: World) -> None:
    family = await world.index.open_family(ENGINE)
    family = await claimed(world.index, ENGINE, family.anchor, CHAIN[:3])
    assert (await world.index.match(CHAIN)).depths == {family.generations[1]: 3}
    assert family.num_claims == 3
    family = await claimed(world.index, ENGINE, family.anchor, CHAIN)
    assert (await depth_of(world.index, family, CHAIN), family.num_claims) == (5, 5)
    assert await claimed(world.index, ENGINE, family.anchor, [CHAIN[0], CHAIN[0]]) == family
    assert await claimed(world.index, ENGINE, family.anchor, []) == family


async def test_next_generation_is_open_before_a_claim_stands_on_it(world: World) -> None:
    """So that a proxy which reads families now and then knows where another one's claims will be."""
    family = await world.index.open_family(ENGINE)
    for number in range(30):
        known = (await world.index.families([ENGINE]))[ENGINE].generations
        blocks = new_blocks(7, number)
        family = await claimed(world.index, ENGINE, family.anchor, blocks)
        depths = (await world.index.match(blocks)).depths
        assert set(depths) <= set(known)
    assert len(family.generations) > 2


async def test_a_generation_is_opened_when_the_newest_holds_a_quarter_of_the_cache(world: World) -> None:
    family = await world.index.open_family(ENGINE)
    first = family.generations[1]
    family = await claimed(world.index, ENGINE, family.anchor, new_blocks(CAPACITY // GENERATIONS_A_CACHE - 1))
    family = await claimed(world.index, ENGINE, family.anchor, CHAIN[:1])
    assert family.generations[1] == first
    family = await claimed(world.index, ENGINE, family.anchor, CHAIN[1:2])
    assert family.generations[2] == first
    assert (await world.index.match(CHAIN)).depths.keys() == {family.generations[1], first}


async def test_used_again_a_prefix_moves_into_the_newest_generation(world: World) -> None:
    """One claim a block: however often it is used, the engine stands once among the holders."""
    family = await world.index.open_family(ENGINE)
    family = await claimed(world.index, ENGINE, family.anchor, CHAIN)
    first = family.generations[1]
    family = await claimed(world.index, ENGINE, family.anchor, new_blocks(10))
    family = await claimed(world.index, ENGINE, family.anchor, CHAIN[:2])
    second = family.generations[1]
    assert second > first
    assert (await world.index.match(CHAIN)).depths == {first: 5, second: 2}
    assert (await world.index.match(CHAIN[:2])).depths == {second: 2}
    assert family.num_claims == 15


async def test_a_generation_goes_when_the_others_hold_a_cache_full(world: World) -> None:
    family = await world.index.open_family(ENGINE)
    parts = [new_blocks(CAPACITY // GENERATIONS_A_CACHE, number) for number in range(8)]
    for number, part in enumerate(parts):
        family = await claimed(world.index, ENGINE, family.anchor, part)
        assert CAPACITY * min(number + 1, 4) / 4 <= family.num_claims < CAPACITY * 5 / 4
        held = [len((await world.index.match(one)).depths) for one in parts[: number + 1]]
        assert held == [0] * (number - 3) + [1] * min(number + 1, 4)


async def test_a_generation_without_claims_goes_at_once(world: World) -> None:
    """Its claims moved to newer ones."""
    family = await world.index.open_family(ENGINE)
    chain = new_blocks(CAPACITY // GENERATIONS_A_CACHE)
    seen: set[int] = set()
    for _ in range(20):
        family = await claimed(world.index, ENGINE, family.anchor, chain)
        seen.add(family.generations[1])
        assert len(family.generations) == 2
    assert len(seen) == 20
    assert family.num_claims == len(chain)


async def test_generations_are_bounded_and_none_goes_too_early(world: World) -> None:
    """Most of each moves on with the next prompt, so that eight together do not hold a cache full."""
    family = await world.index.open_family(ENGINE)
    hot = new_blocks(100)
    for number in range(60):
        family = await claimed(world.index, ENGINE, family.anchor, hot + new_blocks(1, number), 400)
        assert len(family.generations) <= 1 + MOST_GENERATIONS
        assert family.num_claims == 100 + number + 1
    assert len(family.generations) == 1 + MOST_GENERATIONS


async def test_claim_for_another_family_or_none_writes_nothing(world: World) -> None:
    family = await world.index.open_family(ENGINE)
    assert await world.index.claim(OTHER, family.anchor, CHAIN, capacity=CAPACITY) is None
    assert await world.index.claim(ENGINE, family.anchor + 1, CHAIN, capacity=CAPACITY) is None
    assert (await world.index.match(CHAIN)).depths == {}


async def test_a_claim_is_of_a_batch_at_most(world: World) -> None:
    family = await world.index.open_family(ENGINE)
    with pytest.raises(ValueError, match="257"):
        await world.index.claim(ENGINE, family.anchor, new_blocks(MAX_APPLY_HASHES + 1), capacity=CAPACITY)
    family = await claimed(world.index, ENGINE, family.anchor, new_blocks(MAX_APPLY_HASHES), 10**9)
    assert family.num_claims == MAX_APPLY_HASHES


async def test_workers_and_engines_share_blocks_of_many_holders(world: World) -> None:
    """More than stand in a bucket; the engine's claim moves within the list."""
    workers = [(await world.index.register()).incarnation for _ in range(INLINE_CLAIMS)]
    for worker in workers:
        await world.index.apply(worker, 1, CHAIN, [])
    families = {engine: await world.index.open_family(engine) for engine in (ENGINE, OTHER)}
    workers += [(await world.index.register()).incarnation]
    await world.index.apply(workers[-1], 1, CHAIN[:1], [])
    for number in range(6):
        for engine, family in families.items():
            families[engine] = await claimed(world.index, engine, family.anchor, CHAIN)
            await claimed(world.index, engine, family.anchor, new_blocks(10, number))
        depths = dict((await world.index.match(CHAIN)).depths)
        assert [depths.pop(worker) for worker in workers] == [5] * INLINE_CLAIMS + [1]
        assert sorted(depths.values()) == [5, 5]
    for batch, worker in enumerate(workers):
        await world.index.apply(worker, 2, [], CHAIN)
        assert len((await world.index.match(CHAIN)).depths) == len(workers) + 1 - batch
    assert len((await world.index.match(CHAIN)).depths) == 2


async def test_several_proxies_claim_at_once(world: World) -> None:
    family = await world.index.open_family(ENGINE)
    chains = [CHAIN[:2] + new_blocks(5, number) for number in range(40)]
    answers = await asyncio.gather(
        *(world.index.claim(ENGINE, family.anchor, chain, capacity=10_000) for chain in chains)
    )
    assert None not in answers
    family = (await world.index.families([ENGINE]))[ENGINE]
    assert family.num_claims == 2 + 40 * 5
    assert [await depth_of(world.index, family, chain) for chain in chains] == [7] * 40


@pytest.mark.parametrize("num_blocks", [33, 60, 130, 1_500])
async def test_the_deepest_claim_of_an_engine_is_found_whatever_generation_it_is_on(
    world: World, num_blocks: int
) -> None:
    """Also where an older generation holds a piece between two probes only, for a shared prefix is used again."""
    rand = seeded(f"generations of {num_blocks} blocks")
    quarter = num_blocks
    for _ in range(10):
        chain, depths = new_blocks(num_blocks, rand.getrandbits(32)), dict.fromkeys((ENGINE, OTHER, "a third"), 0)
        for engine in depths:
            family = await world.index.open_family(engine)
            depths[engine] = rand.randint(1, num_blocks)
            shared = sorted((rand.randint(1, depths[engine]) for _ in range(rand.randint(0, 3))), reverse=True)
            for end in (depths[engine], *shared):
                await claim_long(world.index, engine, family.anchor, chain[:end], quarter * GENERATIONS_A_CACHE)
                filler = new_blocks(quarter, rand.getrandbits(32))
                if end != (depths[engine], *shared)[-1]:
                    await claim_long(world.index, engine, family.anchor, filler, quarter * GENERATIONS_A_CACHE)
        for engine, family in (await world.index.families(list(depths))).items():
            assert await depth_of(world.index, family, chain) == depths[engine]
            await world.index.open_family(engine, instead_of=family.anchor)


# --- leases


@pytest.fixture
def lease_s() -> float:
    return 100_000.0


async def test_families_that_are_renewed_come_back_and_others_stay_hidden(world: World) -> None:
    families = {engine: await world.index.open_family(engine) for engine in (ENGINE, OTHER)}
    for engine, family in families.items():
        await claimed(world.index, engine, family.anchor, CHAIN)
        for incarnation in (family.anchor, *family.generations):
            world.expire(incarnation)
    assert (await world.index.match(CHAIN)).depths == {}
    found = await world.index.families([ENGINE, OTHER], renew=[OTHER])
    assert {engine: family.generations for engine, family in found.items()} == {
        engine: family.generations for engine, family in families.items()
    }
    assert (await world.index.match(CHAIN)).depths == {families[OTHER].generations[1]: 5}
    await world.index.open_family(ENGINE)
    assert len((await world.index.match(CHAIN)).depths) == 2


async def test_load_and_pending_claims_stand_on_the_anchor_whatever_the_generation(world: World) -> None:
    family = await world.index.open_family(ENGINE)
    load = ProxyLoad(version=1, running=3)
    await world.index.commit(commit_of("place", 1, CHAIN, family.anchor, load=load))
    for number in range(30):
        family = await claimed(world.index, ENGINE, family.anchor, new_blocks(10, number))
    match = await world.index.match(CHAIN, candidates=[family.anchor])
    assert match.pending == {family.anchor: 5}
    assert match.loads[family.anchor].proxies[PROXY_ONE].running == 3


async def sweep_all(world: World) -> int:
    removed = 0
    while True:
        answer = await world.index.sweep("keeper")
        removed += answer.removed_claims
        if answer.status != "more":
            return removed


async def watch(world: World, passed_s: float) -> None:
    for _ in range(round(passed_s / (KEEPER_S - 1))):
        await sweep_all(world)
        world.let_pass(KEEPER_S - 1)


async def test_family_of_an_engine_that_is_gone_is_swept_as_a_whole(world: World) -> None:
    families = {engine: await world.index.open_family(engine) for engine in (ENGINE, OTHER)}
    for engine, family in families.items():
        families[engine] = await claimed(world.index, engine, family.anchor, CHAIN)
    for incarnation in (families[ENGINE].anchor, *families[ENGINE].generations):
        world.expire(incarnation)
    await watch(world, DEAD_AFTER_S * 2)
    await sweep_all(world)
    assert await world.index.families([ENGINE, OTHER]) == {OTHER: families[OTHER]}
    assert await world.index.claim(ENGINE, families[ENGINE].anchor, CHAIN, capacity=CAPACITY) is None
    await world.index.check_integrity()
    new = await world.index.open_family(ENGINE)
    assert new.anchor > families[ENGINE].anchor and new.num_claims == 0
    assert (await world.index.match(CHAIN)).depths == {families[OTHER].generations[1]: 5}


async def test_flushed_families_are_absent_until_they_are_opened(world: World) -> None:
    before = await world.index.open_family(ENGINE)
    await claimed(world.index, ENGINE, before.anchor, CHAIN)
    world.flush()
    assert await world.index.families([ENGINE], renew=[ENGINE]) == {}
    assert await world.index.claim(ENGINE, before.anchor, CHAIN, capacity=CAPACITY) is None
    assert (await world.index.open_family(ENGINE, instead_of=before.anchor)).anchor > before.anchor
    assert (await world.index.match(CHAIN)).depths == {}


# --- against a cache


@pytest.mark.parametrize("capacity", [125, 375])
async def test_claims_follow_a_cache_that_evicts_what_was_used_least_recently(world: World, capacity: int) -> None:
    """What is claimed is the capacity and up to a generation more; predictions are nearly all right to the block."""
    rand = seeded(f"a cache of {capacity}")
    cache = LruBlocks(capacity_blocks=capacity, block_tokens=1)
    family = await world.index.open_family(ENGINE)
    prompts = chats(rand, num_chats=12, shared_blocks=10, turn_blocks=4, num_turns=8)
    right, most, least = 0, 0.0, float("inf")
    for number in range(800):
        chain = next(prompts)
        predicted = await depth_of(world.index, family, chain)
        cached = cache.cached_tokens(chain, len(chain) + 1)
        cache.hold(chain)
        family = await claimed(world.index, ENGINE, family.anchor, chain, capacity)
        if number >= 300:
            assert predicted >= cached, "what the cache holds is claimed"
            right += predicted == cached
            most, least = max(most, family.num_claims / capacity), min(least, family.num_claims / capacity)
    print(f"{right / 500:.3f} right, {least:.2f} to {most:.2f} of the capacity claimed")
    assert right >= 500 * 0.85
    assert 1.0 <= least and most <= 1.5


# --- in Redis


async def test_a_claim_of_a_server_without_memory_is_refused_whole(any_server: Server) -> None:
    """Families are opened and renewed there: they are as few as engines."""
    async with redis_world(any_server) as world:
        family = await world.index.open_family(ENGINE)
        family = await claimed(world.index, ENGINE, family.anchor, new_blocks(10))
        any_server.command("CONFIG", "SET", "maxmemory", 1)
        try:
            with pytest.raises(Exception, match="maxmemory"):
                await world.index.claim(ENGINE, family.anchor, CHAIN, capacity=CAPACITY)
            assert await world.index.families([ENGINE], renew=[ENGINE]) == {ENGINE: family}
            begun = await world.index.open_family(ENGINE, instead_of=family.anchor)
            assert begun.anchor > family.anchor
        finally:
            any_server.command("CONFIG", "SET", "maxmemory", 0)
        assert (await world.index.match(CHAIN)).depths == {}


async def test_a_family_whose_generations_were_lost_gets_new_ones(any_server: Server) -> None:
    """As a keeper leaves it that ended some of a dead family's leases and not yet all."""
    async with redis_world(any_server) as world:
        family = await world.index.open_family(ENGINE)
        family = await claimed(world.index, ENGINE, family.anchor, CHAIN)
        for incarnation in family.generations:
            await world.index.retire(incarnation)
        found = (await world.index.families([ENGINE]))[ENGINE]
        assert (found.anchor, found.generations, found.num_claims) == (family.anchor, (), 0)
        mended = await claimed(world.index, ENGINE, family.anchor, CHAIN)
        assert len(mended.generations) == 2 and mended.num_claims == 5
        assert await depth_of(world.index, mended, CHAIN) == 5


async def test_a_family_without_its_anchor_is_none(world: World) -> None:
    """It is the first to go, for its lease is the oldest."""
    family = await world.index.open_family(ENGINE)
    await world.index.retire(family.anchor)
    assert await world.index.families([ENGINE], renew=[ENGINE]) == {}
    assert await world.index.claim(ENGINE, family.anchor, CHAIN, capacity=CAPACITY) is None
    assert not {*family.generations} & {*(await world.index.open_family(ENGINE)).generations}


async def test_a_family_is_the_packed_ids_of_its_incarnations(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        family = await world.index.open_family(ENGINE)
        packed = b"".join(id_.to_bytes(4, "big") for id_ in (family.anchor, *family.generations))
        assert any_server.command("HGET", KEYS.families, ENGINE) == b"$12\r\n%b\r\n" % packed
