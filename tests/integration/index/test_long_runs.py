"""Blocks with many holders: where their claims stand, and how many a match can take."""

from __future__ import annotations

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
    num_holders = 9_001
    live = [argument for id_ in range(1, num_holders + 1) for argument in (2**52, id_)]
    run = b"".join((id_ << 2).to_bytes(4, "big") for id_ in range(1, num_holders + 1))
    any_server.command("ZADD", KEYS.live, *live)
    any_server.command("HSET", BUCKET, FIELD, LONG_MARKER)
    any_server.command("SET", LONG_RUN, run)
    async with redis_world(any_server) as world:
        assert await world.index.match([1, BLOCK]) == dict.fromkeys(range(1, num_holders + 1), 2)
        any_server.flush()
