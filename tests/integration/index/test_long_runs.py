"""Blocks with many holders: where their claims stand, and how many a match can take."""

from __future__ import annotations

from prefixcache.index import scripts
from prefixcache.index.keys import INLINE_CLAIMS, LONG_CLAIMS, LONG_MARKER
from tests.integration.index.worlds import KEYS, redis_world
from tests.support.valkey import Server

BLOCK = 0x0123456789ABCDEF
BUCKET = f"{KEYS.buckets}8:1"
FIELD = BLOCK.to_bytes(8, "big")[1:]
LONG_RUN = f"{KEYS.long_runs}0123456789abcdef"


async def test_run_moves_out_at_13_claims_and_back_under_8(any_server: Server) -> None:
    """The gap between the two keeps a block with 12 to 13 holders from moving at every change."""
    async with redis_world(any_server) as world:
        incarnations = [(await world.index.register()).incarnation for _ in range(INLINE_CLAIMS + 1)]

        def stands_apart() -> bool:
            apart = any_server.command("EXISTS", LONG_RUN) == b":1\r\n"
            value = any_server.command("HGET", BUCKET, FIELD)
            assert (value == b"$4\r\n" + LONG_MARKER + b"\r\n") == apart
            return apart

        for number, incarnation in enumerate(incarnations, start=1):
            await world.index.apply(incarnation, 1, [BLOCK], [])
            assert stands_apart() == (number > INLINE_CLAIMS)
        for number, incarnation in enumerate(reversed(incarnations[1:]), start=1):
            await world.index.apply(incarnation, 2, [], [BLOCK])
            assert stands_apart() == (len(incarnations) - number >= LONG_CLAIMS)
        await world.index.apply(incarnations[0], 2, [], [BLOCK])
        assert any_server.command("EXISTS", BUCKET, LONG_RUN) == b":0\r\n"


async def test_match_of_more_holders_than_one_call_takes_arguments(any_server: Server) -> None:
    """Every third one's lease has ended, and every second one has the block before as well."""
    num_holders = 9_001
    ids = range(1, num_holders + 1)
    live = [argument for id_ in ids for argument in (2**52 if id_ % 3 else 1, id_)]
    any_server.command("ZADD", KEYS.live, *live)
    for number, some in ((0, ids), (1, ids[::2])):
        any_server.command("HSET", BUCKET, (BLOCK + number).to_bytes(8, "big")[1:], LONG_MARKER)
        run = b"".join((id_ << 2).to_bytes(4, "big") for id_ in some)
        any_server.command("SET", f"{KEYS.long_runs}{BLOCK + number:016x}", run)
    async with redis_world(any_server) as world:
        depths = (await world.index.match([BLOCK, BLOCK + 1])).depths
        assert depths == {id_: 2 if id_ % 2 else 1 for id_ in ids if id_ % 3}
        any_server.flush()


async def test_many_holders_at_one_depth_come_as_one_run(any_server: Server) -> None:
    """256 workers with the same system prompt cost a reader one string, in the order of their ids."""
    async with redis_world(any_server) as world:
        incarnations = [(await world.index.register()).incarnation for _ in range(256)]
        for incarnation in incarnations:
            await world.index.apply(incarnation, 1, [BLOCK, BLOCK + 1], [])
        await world.index.apply(incarnations[7], 2, [], [BLOCK + 1])
        world.expire(incarnations[9])
        chain = BLOCK.to_bytes(8, "big") + (BLOCK + 1).to_bytes(8, "big")
        reply = any_server.command("EVAL", scripts.MATCH.text, 1, KEYS.meta, chain, "", "")
        deeper = [id_ for number, id_ in enumerate(incarnations) if number not in (7, 9)]
        two, one = (b"".join((id_ << 2).to_bytes(4, "big") for id_ in some) for some in (deeper, incarnations[7:8]))
        assert b"*4\r\n:2\r\n$%d\r\n%b\r\n:1\r\n$4\r\n%b\r\n" % (len(two), two, one) in reply


async def test_claims_of_every_tier_are_matched(any_server: Server) -> None:
    """An incarnation's tier may differ from block to block."""
    async with redis_world(any_server) as world:
        one, two = [(await world.index.register()).incarnation for _ in range(2)]
        chain = [BLOCK + number for number in range(10)]
        for number, block in enumerate(chain):
            claims = [one << 2 | number % 4] if number > 5 else [one << 2 | number % 4, two << 2 | 3]
            run = b"".join(claim.to_bytes(4, "big") for claim in claims)
            any_server.command("HSET", BUCKET, block.to_bytes(8, "big")[1:], run)
        assert (await world.index.match(chain)).depths == {one: 10, two: 6}
        any_server.flush()


async def test_a_run_that_the_server_evicted_is_nobody_and_hides_nobody(any_server: Server) -> None:
    """A server that was told to evict keys may take a long run from under its marker."""
    async with redis_world(any_server) as world:
        incarnations = [(await world.index.register()).incarnation for _ in range(INLINE_CLAIMS + 1)]
        for incarnation in incarnations:
            await world.index.apply(incarnation, 1, [BLOCK, BLOCK + 1, BLOCK + 2], [])
        any_server.command("DEL", f"{KEYS.long_runs}{BLOCK + 1:016x}")
        assert (await world.index.match([BLOCK, BLOCK + 1])).depths == dict.fromkeys(incarnations, 1)
        assert (await world.index.match([BLOCK + 1])).depths == {}
        assert (await world.index.match([BLOCK, BLOCK + 1, BLOCK + 2])).depths == dict.fromkeys(incarnations, 3)
        any_server.flush()
