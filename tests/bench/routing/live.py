"""A trace for real, and as the simulator has it: `python -m tests.bench.routing.live`.

Minutes of a trace are sent, some times as fast as they were recorded, to simulated workers behind two proxies, all of
them processes; the simulator of the product is told the same. Where they differ, one of them is wrong.

What a worker costs is a prefill server with decode beside it, as in the simulated tables: rate tokens a second, 25 ms a
token of an answer. In terms of engine steps: every step takes 25 ms at least, and with a chunk of 512 tokens what the
rate says, so that decodes slow no prefill down, and a short prefill takes one step.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from prefixcache.limits import MAX_STEP_TOKENS, PUBLISH_PAUSE_S
from prefixcache.simulation.cells import run_cells
from prefixcache.simulation.costs import StepCosts
from prefixcache.simulation.outcome import Outcome, percentile
from prefixcache.simulation.setup import Setup
from prefixcache.simulation.trace import Trace
from prefixcache.simulation.trace_files import read_trace
from prefixcache.types import KV_BLOCK_SIZE
from tests.bench.report import Floor, Table, report
from tests.bench.routing.live_fleet import MODEL, live_fleet, send_load
from tests.bench.routing.live_load import Answer, Figures, Order
from tests.bench.routing.traces import FOLDER, OURS, PARTS
from worker.sim_costs import CostModel

STEP_S = 0.025
"""The inter-token latency of the simulated tables."""
EVENT_LAG_S = PUBLISH_PAUSE_S
TRACE = "mooncake_conversation_a"
MINUTES = 10.0
SPEED = 10.0
SEEDS = (1, 2, 3, 4, 5)
HIT_POINTS = 2.0
TIMES = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """One run: times are those of the trace, and divided by `speed` in the run."""

    trace: Trace
    rate: float
    """Prefill tokens a second of a worker."""
    capacity_blocks: int
    """Of the trace, for each worker."""
    speed: float
    num_workers: int = 8
    num_proxies: int = 2

    @property
    def costs(self) -> StepCosts:
        chunk_s = MAX_STEP_TOKENS / self.rate
        return StepCosts(
            prefill_us=(chunk_s - STEP_S) / MAX_STEP_TOKENS * 1e6,
            step_ms=STEP_S * 1e3,
            itl_ms=0.0,
            itl_per_sequence_ms=0.0,
            itl_per_1k_context_ms=0.0,
            speed=self.speed,
            step_tokens=MAX_STEP_TOKENS,
        )

    def predicted(self, seeds: Sequence[int]) -> list[Outcome]:
        """What the simulator says; one for each seed."""
        setup = Setup(
            cache_tokens=self.capacity_blocks * self.trace.block_tokens,
            steps=self.costs,
            num_proxies=self.num_proxies,
            event_lag_s=EVENT_LAG_S,
        )
        cell = setup.cell(self.trace, OURS, self.num_workers, arrival_speed=self.speed)
        return [run_cells([cell], (seed,), jobs=1)[0].outcome for seed in seeds]

    async def measured(self, folder: Path) -> tuple[Figures, Mapping[str, float], int]:
        """What clients see, the shares of a core of all processes, and how many requests were moved."""
        fields = asdict(self.costs)
        del fields["step_tokens"]
        num_blocks = self.capacity_blocks * self.trace.block_tokens // KV_BLOCK_SIZE
        async with live_fleet(
            folder,
            num_workers=self.num_workers,
            num_proxies=self.num_proxies,
            num_blocks=num_blocks,
            costs=CostModel(**fields),
        ) as fleet:
            order = Order(
                urls=[proxy.url for proxy in fleet.proxies],
                model=MODEL,
                block_tokens=self.trace.block_tokens,
                requests=list(self.trace.faster(self.speed).requests),
            )
            figures, shares = await send_load(fleet, order)
            return figures, shares, await asyncio.to_thread(fleet.num_steals)


def given_run(path: Path, *, minutes: float, speed: float, num_workers: int = 8, capacity: float = 0.10) -> Live:
    """The first minutes of a trace, on a fleet that the whole trace gives its size and its rate."""
    whole = read_trace(path)
    scenario = Setup().cell(whole, OURS, num_workers, capacity=capacity).scenario
    return Live(
        trace=whole.between(0, 60 * minutes),
        rate=scenario.costs.prefill_rate,
        capacity_blocks=scenario.capacity_blocks,
        speed=speed,
        num_workers=num_workers,
    )


def quick_run() -> Live:
    """Half a minute of chats on two workers, in a few seconds."""
    trace = read_trace(PARTS / "mooncake_conversation_part.jsonl").between(0, 30)
    return Live(trace=trace, rate=20_000.0, capacity_blocks=300, speed=10.0, num_workers=2)


def measure_given(*, quick: bool, speed: float, minutes: float = MINUTES) -> tuple[list[Table], list[Floor]]:
    """Of the given trace, where it is at hand."""
    path = FOLDER / f"{TRACE}.jsonl.gz"
    if not quick and not path.is_file():
        print(f"left out: the live run: no {path} (PREFIXCACHE_TRACES names another folder)")
        return [], []
    return measure_live(quick_run() if quick else given_run(path, minutes=minutes, speed=speed))


def measure_live(live: Live, seeds: Sequence[int] = SEEDS) -> tuple[list[Table], list[Floor]]:
    predicted = live.predicted(seeds)
    with tempfile.TemporaryDirectory() as folder:
        figures, shares, num_steals = asyncio.run(live.measured(Path(folder)))
    return results(live, predicted, figures, shares, num_steals)


def results(
    live: Live, predicted: Sequence[Outcome], figures: Figures, shares: Mapping[str, float], num_steals: int
) -> tuple[list[Table], list[Floor]]:
    good = [answer for answer in figures.answers if answer.ttft_s is not None]
    errors = Counter(answer.error for answer in figures.answers if answer.error)
    ttft = sorted(answer.ttft_s for answer in good if answer.ttft_s is not None)
    late = sorted(answer.late_s for answer in figures.answers)
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    of_worker = Counter(answer.worker for answer in good)
    seen: dict[str, float] = {
        "hit_rate": sum(answer.cached_tokens for answer in good) / prompt_tokens,
        "ttft_mean_s": fmean(ttft),
        **{f"ttft_p{share}_s": percentile(ttft, share / 100) for share in (50, 90, 99)},
    }
    expected = {name: fmean(getattr(outcome, name) for outcome in predicted) for name in (*seen, "steals")}
    rows: list[Mapping[str, object]] = [
        {"": "predicted, mean of the seeds", **expected},
        {"": "their least", **{name: min(getattr(each, name) for each in predicted) for name in expected}},
        {"": "their greatest", **{name: max(getattr(each, name) for each in predicted) for name in expected}},
        {"": "measured", **seen, "steals": num_steals},
    ]
    about: Mapping[str, object] = {
        "requests": len(figures.answers),
        "errors": sum(errors.values()),
        "requests of each worker": tuple(sorted(of_worker.values())),
        "late p50 ms": percentile(late, 0.5) * 1e3,
        "late p99 ms": percentile(late, 0.99) * 1e3,
        "predicted, not cached": sum(_excess(answer) for answer in good) / prompt_tokens,
        "cached, not predicted": sum(_missing(answer) for answer in good) / prompt_tokens,
        "last answer s": figures.took_s,
    }
    for error, number in errors.most_common(3):
        print(f"{number} times: {error}")
    speed = f"{live.num_workers} workers, {live.num_proxies} proxies, {live.speed:g} times as fast"
    tables = [
        Table(title=f"{live.trace.name} live, {speed}: seconds of the run", rows=rows),
        Table(title="The live run", rows=[about]),
        Table(title="Shares of a core", rows=[shares_row(shares)]),
    ]
    floors = [
        Floor(what="live: requests that failed", value=float(sum(errors.values())), most=0.0),
        Floor(
            what="live: hit rate, points off the prediction",
            value=100 * abs(seen["hit_rate"] - expected["hit_rate"]),
            most=HIT_POINTS,
        ),
    ]
    for name in ("ttft_p50_s", "ttft_p90_s"):
        off = abs(seen[name] / expected[name] - 1)
        floors.append(Floor(what=f"live: {name[:-2]} off the prediction by", value=off, most=TIMES))
    return tables, floors


def shares_row(shares: Mapping[str, float]) -> Mapping[str, object]:
    """Workers as least and greatest, and the sum of all."""
    workers = sorted(share for name, share in shares.items() if name.startswith("worker-"))
    others = {name: share for name, share in shares.items() if not name.startswith("worker-")}
    return {**others, "workers, least and greatest": (workers[0], workers[-1]), "all": sum(shares.values())}


def _excess(answer: Answer) -> int:
    return max(answer.predicted_tokens - answer.cached_tokens, 0)


def _missing(answer: Answer) -> int:
    return max(answer.cached_tokens - answer.predicted_tokens, 0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a smoke of a few seconds, floors not judged")
    options.add_argument("--speed", type=float, default=SPEED, help="times as fast as the trace")
    options.add_argument("--minutes", type=float, default=MINUTES, help="of the trace, from its beginning")
    chosen = options.parse_args()
    began_s = time.monotonic()
    tables, floors = measure_given(quick=chosen.quick, speed=chosen.speed, minutes=chosen.minutes)
    for table in tables:
        table.show()
    name = "routing-live-quick" if chosen.quick else "routing-live"
    report(name, tables, floors, about={"took_s": round(time.monotonic() - began_s)}, judged=not chosen.quick)


if __name__ == "__main__":
    main()
