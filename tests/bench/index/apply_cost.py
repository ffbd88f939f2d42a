"""Cost of an apply of 256 hashes: growing from empty with splits, onto blocks that others hold, and removing."""

from __future__ import annotations

from functools import partial

from prefixcache.limits import MAX_APPLY_HASHES
from tests.bench.index.bench import Bench, CallCosts, Writer, call_costs, cost_row, spread
from tests.bench.index.flat_layout import FlatLayout
from tests.bench.index.tree_shapes import new_hashes
from tests.bench.report import Floor, Table

MOST_MEAN_MS = 1.5
ROUNDS = 3
FLAT_HOLDER = 1


async def measure_apply(bench: Bench, flat: FlatLayout) -> tuple[Table, list[Floor]]:
    rounds: dict[str, list[CallCosts]] = {}
    for _ in range(min(ROUNDS, bench.sizes.repeats)):
        bench.server.flush()
        index = bench.new_index()
        first, second = [await Writer.register(index) for _ in range(2)]
        batches = [new_hashes(bench.random, MAX_APPLY_HASHES) for _ in range(bench.sizes.apply_calls)]
        steps = {
            "256 stored, growing from empty": [partial(first.apply, batch) for batch in batches],
            "256 stored, a second holder": [partial(second.apply, batch) for batch in batches],
            "256 removed, held by another": [partial(first.apply, (), batch) for batch in batches],
            "256 removed, the last holder": [partial(second.apply, (), batch) for batch in batches],
        }
        for what, calls in steps.items():
            rounds.setdefault(what, []).append(await call_costs(bench.server, calls))
        bench.server.flush()
        for what, action in (("flat: 256 HSET in a pipeline", flat.store), ("flat: 256 HDEL", flat.remove)):
            calls = [partial(action, FLAT_HOLDER, batch) for batch in batches]
            rounds.setdefault(what, []).append(await call_costs(bench.server, calls))
    floors = [
        Floor(what=f"apply, {what}: mean server ms", value=spread([one.mean_ms for one in costs])[1], most=MOST_MEAN_MS)
        for what, costs in rounds.items()
        if not what.startswith("flat")
    ]
    bench.server.flush()
    title = "apply of 256 hashes; least / median / most of the rounds, p99 and longest of all calls"
    return Table(title=title, rows=[cost_row(what, costs) for what, costs in rounds.items()]), floors
