"""Cost of a claim of 256 hashes: new blocks, blocks that move between generations, blocks that others hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from prefixcache.index.family import GENERATIONS_A_CACHE
from prefixcache.index.redis_index import RedisIndex
from prefixcache.limits import MAX_APPLY_HASHES
from tests.bench.index.bench import Bench, CallCosts, Writer, call_costs, cost_row, spread
from tests.bench.index.tree_shapes import new_hashes
from tests.bench.report import Floor, Table

MOST_MEAN_MS = 1.5
ROUNDS = 3
AMPLE = 2**30
"""Index blocks of a cache whose first generation is never full."""
NUM_OTHERS = 3
FULL_AT_ONCE = MAX_APPLY_HASHES * GENERATIONS_A_CACHE
"""Every claim fills a generation: the next one opens another, and the fifth before it goes."""

_Call = Callable[[], Awaitable[object]]


async def measure_claim(bench: Bench) -> tuple[Table, list[Floor]]:
    rounds: dict[str, list[CallCosts]] = {}
    for _ in range(min(ROUNDS, bench.sizes.repeats)):
        bench.server.flush()
        index = bench.new_index()
        batches = [new_hashes(bench.random, MAX_APPLY_HASHES) for _ in range(bench.sizes.apply_calls)]
        others = [await Writer.register(index) for _ in range(NUM_OTHERS)]
        shared = batches[: len(batches) // 4]
        steps = {
            "new, growing from empty": [await _claims(index, "one", some, AMPLE) for some in batches],
            "held already": [await _claims(index, "one", some, AMPLE) for some in batches],
            "moved to a new generation, each call": [
                await _claims(index, "two", shared[0], MAX_APPLY_HASHES) for _ in range(len(batches))
            ],
            "a generation opened and one retired, each call": [
                await _claims(index, "three", some, FULL_AT_ONCE) for some in batches
            ],
        }
        for what, calls in steps.items():
            rounds.setdefault(what, []).append(await call_costs(bench.server, calls))
        for writer in others:
            for some in shared:
                await writer.store(some)
        calls = [await _claims(index, "four", some, AMPLE) for some in shared]
        rounds.setdefault(f"held by {NUM_OTHERS} others", []).append(await call_costs(bench.server, calls))
    floors = [
        Floor(what=f"claim, {what}: mean server ms", value=spread([one.mean_ms for one in costs])[1], most=MOST_MEAN_MS)
        for what, costs in rounds.items()
    ]
    bench.server.flush()
    title = "claim of 256 hashes; least / median / most of the rounds, p99 and longest of all calls"
    return Table(title=title, rows=[cost_row(what, costs) for what, costs in rounds.items()]), floors


async def _claims(index: RedisIndex, engine: str, blocks: Sequence[int], capacity: int) -> _Call:
    family = await index.open_family(engine)
    return partial(index.claim, engine, family.anchor, blocks, capacity=capacity)
