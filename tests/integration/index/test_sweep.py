"""The keeper: who is dead and who only silent, one office at a time, and dead claims that go while others stay."""

from __future__ import annotations

import asyncio

import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.index import redis_index
from prefixcache.index.base import SweepAnswer
from prefixcache.index.keys import LONG_MARKER
from prefixcache.limits import DEAD_AFTER_S, KEEPER_S, MAX_APPLY_HASHES
from tests.integration.index.worlds import KEYS, RedisWorld, redis_world
from tests.support.index_commits import PROXY_ONE, commit_of
from tests.support.index_worlds import World
from tests.support.seeds import seeded
from tests.support.valkey import Server

CHAIN = [0x0101010101010101 * number for number in range(1, 6)]
LONG_LEASE_S = 100_000.0


async def registered(world: World, number: int) -> list[int]:
    return [(await world.index.register()).incarnation for _ in range(number)]


async def hold(world: World, incarnation: int, blocks: list[int], first_batch: int = 1) -> None:
    for batch, start in enumerate(range(0, len(blocks), MAX_APPLY_HASHES), start=first_batch):
        answer = await world.index.apply(incarnation, batch, blocks[start : start + MAX_APPLY_HASHES], [])
        assert answer.status == "ok"


async def watch(world: World, watched_s: float, keeper_id: str = "k") -> int:
    """A keeper at work for so long; returns how many incarnations it found dead."""
    num_dead = (await world.index.sweep(keeper_id)).dead_incarnations
    while watched_s > 0:
        step_s = min(watched_s, KEEPER_S - 1)
        watched_s -= step_s
        world.let_pass(step_s)
        num_dead += (await world.index.sweep(keeper_id)).dead_incarnations
    return num_dead


async def sweep_all(world: World, keeper_id: str = "k") -> tuple[int, int]:
    """Calls until there is nothing left, and the claims they removed."""
    calls = removed = 0
    while True:
        answer = await world.index.sweep(keeper_id)
        calls += 1
        removed += answer.removed_claims
        if answer.status != "more":
            assert answer.status == "idle"
            return calls, removed
        assert calls < 10_000


# --- who is dead


async def test_lease_that_ended_hides_and_is_dead_after_a_watched_time(world: World) -> None:
    silent, renewed = await registered(world, 2)
    await hold(world, silent, CHAIN)
    await hold(world, renewed, CHAIN[:2])
    await world.index.commit(commit_of("place", 1, CHAIN, silent))
    world.expire(silent)
    assert await watch(world, DEAD_AFTER_S - 1) == 0
    assert await world.index.renew(renewed)
    assert (await world.index.apply(silent, 2, [], CHAIN[4:])).status == "ok"
    assert await watch(world, 2) == 1
    assert not await world.index.renew(silent)
    assert (await world.index.apply(silent, 3, CHAIN, [])).status == "dead"
    assert await world.index.exchange_loads(PROXY_ONE, {}, [silent]) == {}
    assert (await world.index.match(CHAIN)).depths == {renewed: 2}
    await sweep_all(world)
    await world.index.check_integrity({silent: 0, renewed: 2})


async def test_hidden_incarnation_comes_back_as_long_as_it_is_not_dead(world: World) -> None:
    (one,) = await registered(world, 1)
    await hold(world, one, CHAIN)
    assert await watch(world, DEAD_AFTER_S + 1) == 0  # its lease ended only a while ago
    assert await world.index.renew(one)
    assert (await world.index.match(CHAIN)).depths == {one: 5}


async def test_store_that_stood_still_kills_nobody(world: World) -> None:
    """All leases ended at once, long ago, but nobody could renew: the watch begins anew."""
    incarnations = await registered(world, 5)
    for incarnation in incarnations:
        await hold(world, incarnation, CHAIN)
    assert await watch(world, DEAD_AFTER_S - 1) == 0
    world.let_pass(10 * DEAD_AFTER_S)
    assert await watch(world, DEAD_AFTER_S - 1) == 0
    for incarnation in incarnations[:3]:
        assert await world.index.renew(incarnation)
    assert await watch(world, 2) == 2
    assert (await world.index.match(CHAIN)).depths == dict.fromkeys(incarnations[:3], 5)


async def test_claims_go_with_the_call_that_finds_their_owner_dead(world: World) -> None:
    one, two = await registered(world, 2)
    await hold(world, one, CHAIN)
    await hold(world, two, CHAIN[:2])
    world.expire(one)
    assert await watch(world, DEAD_AFTER_S - 1) == 0
    assert await world.index.renew(two)
    world.let_pass(2)
    assert await world.index.sweep("k") == SweepAnswer(status="idle", dead_incarnations=1, removed_claims=5)


async def test_dead_without_claims_is_removed_as_well(world: World) -> None:
    (one,) = await registered(world, 1)
    world.expire(one)
    assert await watch(world, DEAD_AFTER_S + 1) == 1
    assert await world.index.sweep("k") == SweepAnswer(status="idle")
    assert not await world.index.renew(one)


# --- the office


async def test_one_keeper_at_a_time(world: World) -> None:
    assert await world.index.sweep("one") == SweepAnswer(status="idle")
    assert await world.index.sweep("two") == SweepAnswer(status="other")
    for _ in range(3):  # each call renews the office
        world.let_pass(KEEPER_S - 1)
        assert (await world.index.sweep("one")).status == "idle"
        assert (await world.index.sweep("two")).status == "other"
    world.let_pass(KEEPER_S + 1)
    assert (await world.index.sweep("two")).status == "idle"
    assert (await world.index.sweep("one")).status == "other"


async def test_the_watch_goes_on_when_another_takes_the_office_in_time(any_server: Server) -> None:
    async with redis_world(any_server, lease_s=LONG_LEASE_S) as world:
        (one,) = await registered(world, 1)
        world.expire(one)
        assert await watch(world, DEAD_AFTER_S - 5, "one") == 0
        any_server.command("DEL", KEYS.keeper)
        assert await watch(world, 6, "two") == 1


async def test_who_does_not_hold_the_office_changes_nothing(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        (one,) = await registered(world, 1)
        await hold(world, one, CHAIN)
        await world.index.retire(one)
        await world.index.sweep("other")
        any_server.command("HSET", KEYS.meta, "swept_at", 1, "watched_since", 1)
        before = any_server.command("HGETALL", KEYS.meta)
        assert await world.index.sweep("k") == SweepAnswer(status="other")
        assert any_server.command("HGETALL", KEYS.meta) == before


async def test_a_renewal_beside_the_removal_is_either_before_or_after_it(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        assert await watch(world, DEAD_AFTER_S + 1) == 0
        incarnations = await registered(world, 60)
        for incarnation in incarnations:
            await world.index.apply(incarnation, 1, CHAIN, [])
            world.expire(incarnation)
        calls = [asyncio.ensure_future(world.index.renew(incarnation)) for incarnation in incarnations[:30]]
        sweep = asyncio.ensure_future(world.index.sweep("k"))
        calls += [asyncio.ensure_future(world.index.renew(incarnation)) for incarnation in incarnations[30:]]
        swept, renewed = await sweep, await asyncio.gather(*calls)
        assert renewed.count(False) == swept.dead_incarnations
        alive = [incarnation for incarnation, is_renewed in zip(incarnations, renewed, strict=True) if is_renewed]
        await sweep_all(world)
        assert (await world.index.match(CHAIN)).depths == dict.fromkeys(alive, 5)


# --- dead claims


@pytest.fixture
def few_fields(monkeypatch: pytest.MonkeyPatch) -> int:
    """So that a sweep takes many calls."""
    monkeypatch.setattr(redis_index, "SWEEP_FIELDS", 40)
    return 40


async def test_dead_claims_go_and_the_living_lose_nothing(any_server: Server, few_fields: int) -> None:
    """Blocks of one holder, of a few, and long lists of which most, or all, are dead."""
    rand = seeded("dead claims")
    async with redis_world(any_server, fields_per_bucket=4) as world:
        everybody = await registered(world, 40)
        shared = [rand.getrandbits(64) for _ in range(60)]
        living = rand.sample(everybody, 5)
        held: dict[int, list[int]] = {}
        for incarnation in everybody:
            some = shared[: rand.randint(1, 60)]
            held[incarnation] = some + [rand.getrandbits(64) for _ in range(rand.randint(0, 100))]
            await hold(world, incarnation, held[incarnation])
        dead_claims = sum(len(blocks) for incarnation, blocks in held.items() if incarnation not in living)
        for incarnation in everybody:
            if incarnation not in living:
                await world.index.retire(incarnation)
        calls = removed = 0
        status = "more"
        while status == "more":
            answer = await world.index.sweep("k")
            status, calls, removed = answer.status, calls + 1, removed + answer.removed_claims
            incarnation = rand.choice(living)
            depths = (await world.index.match(held[incarnation])).depths
            assert depths[incarnation] == len(held[incarnation]) and depths.keys() <= set(living)
            if calls % 10 == 0:
                await world.index.check_integrity()
        assert removed == dead_claims
        assert calls > 20
        await world.index.check_integrity({incarnation: len(held[incarnation]) for incarnation in living})
        for incarnation in living:
            await world.index.retire(incarnation)
        await sweep_all(world)
        assert any_server.command("HGET", KEYS.meta, "fields") == b"$1\r\n0\r\n"
        assert any_server.command("EXISTS", KEYS.claims_held) == b":0\r\n"


async def test_buckets_may_divide_between_two_calls(any_server: Server, few_fields: int) -> None:
    """The walk goes by hash: whatever is divided before or behind it, no dead claim is left out."""
    rand = seeded("divisions")
    async with redis_world(any_server, fields_per_bucket=2) as world:
        dead, living = await registered(world, 2)
        blocks = [rand.getrandbits(64) for _ in range(2_000)]
        await hold(world, dead, blocks)
        await world.index.retire(dead)
        batch, kept, removed = 0, [block for block in blocks if rand.random() < 0.1], 0
        await hold(world, living, kept)
        batch = 1 + (len(kept) - 1) // MAX_APPLY_HASHES
        status = "more"
        while status == "more":
            answer = await world.index.sweep("k")
            status, removed = answer.status, removed + answer.removed_claims
            if batch < 100 and rand.random() < 0.5:
                batch += 1
                new = [rand.getrandbits(64) for _ in range(20)]
                kept += new
                assert (await world.index.apply(living, batch, new, [])).status == "ok"
        assert removed == len(blocks)
        assert (await world.index.match(kept)).depths == {living: len(kept)}
        await world.index.check_integrity({living: len(kept)})


async def test_who_dies_behind_the_walk_is_met_in_its_next_round(any_server: Server, few_fields: int) -> None:
    rand = seeded("rounds")
    async with redis_world(any_server) as world:
        first, second = await registered(world, 2)
        blocks = sorted(rand.getrandbits(64) for _ in range(1_000))
        await hold(world, first, blocks)
        await hold(world, second, blocks[:10] + blocks[-10:])
        await world.index.retire(first)
        for _ in range(20):
            assert (await world.index.sweep("k")).status == "more"
        await world.index.retire(second)
        await sweep_all(world)
        assert any_server.command("EXISTS", KEYS.claims_held) == b":0\r\n"


async def test_a_bucket_full_of_long_lists_takes_several_calls(
    any_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the leading bits of the blocks are equal, which is as fine as the walk can stop."""
    monkeypatch.setattr(redis_index, "SWEEP_FIELDS", 1)
    rand = seeded("a full bucket")
    blocks = [0x42 << 56 | rand.getrandbits(56) for _ in range(30)]
    blocks += [0x42424242 << 32 | number for number in range(3)]
    async with redis_world(any_server, fields_per_bucket=1_000) as world:
        living, dead = await registered(world, 10), await registered(world, 10)
        for incarnation in living + dead:
            await hold(world, incarnation, blocks)
        for incarnation in dead:
            await world.index.retire(incarnation)
        assert await written_runs(any_server, world) == {3: 1, 1: 30}
        assert (await world.index.match(blocks[:30])).depths == dict.fromkeys(living, 30)
        for incarnation in living[1:]:
            await world.index.retire(incarnation)
        await sweep_all(world)
        assert (await world.index.match(blocks)).depths == {living[0]: len(blocks)}
        await world.index.check_integrity({living[0]: len(blocks)})
        assert LONG_MARKER not in any_server.command("HVALS", f"{KEYS.buckets}8:66")


async def written_runs(server: Server, world: RedisWorld) -> dict[int, int]:
    """Long runs written by a call -> calls that wrote so many, of a sweep to its end."""
    counts: dict[int, int] = {}
    for _ in range(1_000):
        with server.monitored() as commands:
            status = (await world.index.sweep("k")).status
            written = sum(words[0] == "SET" and words[1].startswith(KEYS.long_runs) for words in commands())
        if written:
            counts[written] = counts.get(written, 0) + 1
        if status != "more":
            break
    return counts


async def test_a_server_without_memory_is_swept(any_server: Server) -> None:
    """Nothing may grow there, but what is dead goes, and makes room."""
    async with redis_world(any_server) as world:
        dead, living = await registered(world, 2)
        await hold(world, dead, list(range(1, 1_000)))
        await hold(world, living, list(range(1, 200)))
        await world.index.retire(dead)
        any_server.command("CONFIG", "SET", "maxmemory", 1)
        try:
            with pytest.raises(IndexUnavailable, match="maxmemory"):
                await world.index.apply(living, 2, [5_000], [])
            assert (await sweep_all(world))[1] == 999
        finally:
            any_server.command("CONFIG", "SET", "maxmemory", 0)
        assert (await world.index.match([*range(1, 200)])).depths == {living: 199}


async def test_a_sweep_ends_where_the_server_lost_keys(any_server: Server) -> None:
    """One that is told to evict keys: the count of who was dead for a whole round goes, whatever it says."""
    async with redis_world(any_server) as world:
        dead, living = await registered(world, 2)
        await hold(world, dead, [1, 2 << 56])
        await hold(world, living, [2 << 56])
        any_server.command("DEL", f"{KEYS.buckets}8:0")
        await world.index.retire(dead)
        assert (await sweep_all(world))[1] == 1
        assert any_server.command("HGETALL", KEYS.claims_held) == b"*2\r\n$%d\r\n%d\r\n$1\r\n1\r\n" % (
            len(str(living)),
            living,
        )
        any_server.flush()  # its content is not whole


@pytest.mark.parametrize("field", ["cursor", "dying", "swept_at", "watched_since"])
@pytest.mark.parametrize("value", ["-5", "nan", "1e30", "abc"])
async def test_a_keeper_whose_notes_were_written_over_goes_on(any_server: Server, field: str, value: str) -> None:
    async with redis_world(any_server) as world:
        dead, living = await registered(world, 2)
        await hold(world, dead, list(range(1, 300)))
        await hold(world, living, list(range(200, 400)))
        await world.index.retire(dead)
        any_server.command("HSET", KEYS.meta, field, value)
        assert (await sweep_all(world))[1] == 299
        assert (await world.index.match([*range(200, 400)])).depths == {living: 200}


@pytest.mark.parametrize("name", ["abc", "", "-7", "0", "007", "1.5", "nan", "99999999999999", str(2**30)])
async def test_counts_of_what_is_no_incarnation_go(any_server: Server, name: str) -> None:
    async with redis_world(any_server) as world:
        (dead,) = await registered(world, 1)
        await hold(world, dead, CHAIN)
        await world.index.retire(dead)
        any_server.command("HSET", KEYS.claims_held, name, "7")
        assert (await sweep_all(world))[1] == len(CHAIN)
        assert any_server.command("EXISTS", KEYS.claims_held) == b":0\r\n"
