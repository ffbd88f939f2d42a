"""CPU of the client for calls that one turn of the loop makes: match of 128 blocks, 16 at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from prefixcache.index import scripts
from tests.bench.index.bench import Bench, spread
from tests.bench.index.match_cost import Case, Fleet
from tests.bench.index.tree_shapes import new_hashes
from tests.bench.report import Floor, Table

CALLS_A_TICK = 16
NUM_BLOCKS = 128
MOST_CLIENT_US = 40.0


async def measure_client(bench: Bench) -> tuple[Table, list[Floor]]:
    bench.server.flush()
    fleet, silent = await Fleet.open(bench), await Fleet.open(bench)
    chain = new_hashes(bench.random, NUM_BLOCKS)
    for holder in (*fleet.holders, *silent.holders):
        await holder.store(chain)
    await fleet.tell_loads([chain])
    depths = {holder.incarnation: NUM_BLOCKS for holder in fleet.holders}
    recorder = await fleet.check(Case(name="all hold it", chain=chain, depths=depths))
    words = ("EVALSHA", scripts.MATCH.sha1, 1, *recorder.arguments)
    redis = Redis(unix_socket_path=bench.server.url.removeprefix("unix://"), max_connections=CALLS_A_TICK)
    execute: Callable[..., Awaitable[object]] = redis.execute_command

    async def without_loads() -> None:
        await asyncio.gather(*(silent.index.match(chain) for _ in range(CALLS_A_TICK)))

    async def whole() -> None:
        await asyncio.gather(*(fleet.index.match(chain, candidates=fleet.candidates) for _ in range(CALLS_A_TICK)))

    async def bare() -> None:
        await asyncio.gather(*(recorder.again() for _ in range(CALLS_A_TICK)))

    async def one_by_one() -> None:
        await asyncio.gather(*(execute(*words) for _ in range(CALLS_A_TICK)))

    async def pipelined() -> None:
        async with redis.pipeline(transaction=False) as pipeline:
            for _ in range(CALLS_A_TICK):
                pipeline.execute_command(*words)
            await pipeline.execute()

    ticks: dict[str, Callable[[], Awaitable[None]]] = {
        "RedisIndex.match": whole,
        "RedisIndex.match, no loads": without_loads,
        "HotClient.run, answer not read": bare,
        "redis-py, a connection a call": one_by_one,
        "redis-py, one pipeline": pipelined,
    }
    client_us: dict[str, list[float]] = {what: [] for what in ticks}
    for _ in range(bench.sizes.repeats):
        for what, tick in ticks.items():
            await fleet.tell_loads([chain])
            await tick()
            began_s = time.process_time()
            for _ in range(bench.sizes.ticks):
                await tick()
            calls = bench.sizes.ticks * CALLS_A_TICK
            client_us[what].append((time.process_time() - began_s) / calls * 1e6)
    await redis.aclose()
    own = spread(client_us["RedisIndex.match"])
    rows: list[dict[str, object]] = [
        {"client": what, "CPU us a call": spread(values), "x RedisIndex": spread(values)[1] / own[1]}
        for what, values in client_us.items()
    ]
    title = f"CPU of the client, match of {NUM_BLOCKS} blocks, {CALLS_A_TICK} calls in one turn of the loop"
    return Table(title=title, rows=rows), [
        Floor(what="client CPU of a coalesced match, us", value=own[1], most=MOST_CLIENT_US)
    ]
