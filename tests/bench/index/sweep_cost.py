"""The keeper's sweep of a million dead claims beside living ones: its calls, the longest of them, the whole time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator

from prefixcache.index.base import SweepAnswer
from prefixcache.limits import SWEEP_PAUSE_S
from tests.bench.index.bench import Bench, Writer, call_costs
from tests.bench.index.tree_shapes import new_hashes
from tests.bench.report import Floor, Table

KEEPER_ID = "00000000000000b1"
DEAD_WORKERS = 8
SHARED_WITH_THE_LIVING = 8
"""One block in so many of a dead worker is held by a living one too."""
MOST_CALL_MS = 2.0


async def measure_sweep(bench: Bench) -> tuple[Table, list[Floor]]:
    bench.server.flush()
    index = bench.new_index()
    living = await Writer.register(index)
    dying = [await Writer.register(index) for _ in range(DEAD_WORKERS)]
    for writer in dying:
        blocks = new_hashes(bench.random, bench.sizes.dead_claims // DEAD_WORKERS)
        await writer.store(blocks)
        await living.store(blocks[::SHARED_WITH_THE_LIVING])
    for writer in dying:
        await index.retire(writer.incarnation)
    answers: list[SweepAnswer] = []

    async def sweep() -> None:
        answers.append(await index.sweep(KEEPER_ID))
        assert answers[-1].status != "other", "another keeper is at work"

    def until_idle() -> Iterator[Callable[[], Awaitable[None]]]:
        while not answers or answers[-1].status == "more":
            yield sweep

    began_s = time.perf_counter()
    costs = await call_costs(bench.server, until_idle())
    duration_s = time.perf_counter() - began_s
    removed = sum(answer.removed_claims for answer in answers)
    assert removed == bench.sizes.dead_claims // DEAD_WORKERS * DEAD_WORKERS, removed
    rows: list[dict[str, object]] = [
        {
            "dead claims": removed,
            "calls": len(answers),
            **costs.row(),
            "server CPU s": sum(costs.server_s),
            "whole s without pauses": duration_s,
            "whole s": duration_s + len(answers) * SWEEP_PAUSE_S,
        }
    ]
    bench.server.flush()
    title = "Sweep of dead claims beside living ones"
    return Table(title=title, rows=rows), [
        Floor(what="longest call of the sweep, ms", value=max(costs.longest_s) * 1e3, most=MOST_CALL_MS)
    ]
