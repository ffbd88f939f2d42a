"""Traces x workers x capacity x policies in the simulator, with the bound: `python -m tests.bench.routing.traces`.

The traces are no part of this repository: `*.jsonl.gz` in PREFIXCACHE_TRACES, or in shared/traces beside the checkout.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prefixcache.cpu import usable_cores
from prefixcache.simulation.cells import Cell, Row, run_cells
from prefixcache.simulation.outcome import Outcome
from prefixcache.simulation.policies import NAMES, POOLED, POOLED_SLICES
from prefixcache.simulation.setup import Setup
from prefixcache.simulation.trace import Trace
from prefixcache.simulation.trace_files import read_trace
from tests.bench.report import Floor, Table, report
from tests.bench.routing.published import SEEDS as MANY_SEEDS
from tests.bench.routing.published import agreement, thrashes

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ.get("PREFIXCACHE_TRACES") or ROOT.parent / "shared" / "traces")
PARTS = ROOT / "tests" / "unit" / "prefixcache" / "simulation" / "data"
TRACES = ("mooncake_conversation_a", "toolagent_like", "coding_21", "coding_22")
SEEDS = (0, 1, 2)
OURS = "eta"
MAIN = 8
"""Workers of the large table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Of eta, against the bound at the same size; None is not asked."""

    hit: float | None = None
    p50: float | None = None
    mean: float | None = None
    p99: float | None = None
    p50_s: float | None = None


CHATS = Wanted(hit=0.94, p50=0.95, mean=1.0, p99=1.3)
TOOLS = Wanted(hit=0.99, p50=0.8, mean=0.85, p99=1.35)
CODING = Wanted(hit=0.99, mean=1.2, p99=1.3, p50_s=1.3)
CROWD = Wanted(hit=0.84, mean=2.3)
ROOMY = Wanted(hit=0.99, mean=1.4)
SHOWN = Wanted()


def sizes(trace: Trace) -> Mapping[tuple[int, float], Wanted]:
    """Workers and capacity, and what is asked of eta there."""
    if trace.is_closed_loop:
        return {
            (4, 0.25): CODING,
            (MAIN, 0.25): CODING,
            (16, 0.25): CROWD,
            (MAIN, 0.50): ROOMY,
            (MAIN, 0.05): SHOWN,
        }
    wanted = TOOLS if trace.name == "toolagent_like" else CHATS
    return {(4, 0.10): wanted, (MAIN, 0.10): wanted, (16, 0.10): CROWD, (MAIN, 0.05): SHOWN}


def given_traces(folder: Path = FOLDER) -> tuple[list[Trace], list[str]]:
    """Those that are there, and a line for each that is not."""
    files = {name: folder / f"{name}.jsonl.gz" for name in TRACES}
    left_out = [
        f"left out: {name}: no {path} (PREFIXCACHE_TRACES names another folder)" for name, path in files.items()
    ]
    there = [path.is_file() for path in files.values()]
    return (
        [read_trace(path) for path, is_there in zip(files.values(), there, strict=True) if is_there],
        [line for line, is_there in zip(left_out, there, strict=True) if not is_there],
    )


def measure_traces(*, quick: bool) -> tuple[list[Table], list[Floor]]:
    """`quick`: on the parts of traces that tests have, a smoke."""
    if quick:
        traces = [read_trace(path) for path in sorted(PARTS.glob("*.jsonl"))]
        asked = {(trace.name, 2, 0.25): CROWD for trace in traces}
        seeds: Sequence[int] = SEEDS[:1]
        many = seeds
    else:
        traces, left_out = given_traces()
        for line in left_out:
            print(line)
        asked = {(trace.name, *size): wanted for trace in traces for size, wanted in sizes(trace).items()}
        seeds = SEEDS
        many = MANY_SEEDS
    by_name = {trace.name: trace for trace in traces}
    cells = [
        _cell(by_name[name], policy, workers, capacity)
        for name, workers, capacity in asked
        for policy in _policies(workers, capacity, by_name[name])
    ]
    return _results(_run(cells, seeds, many), asked)


def _cell(trace: Trace, policy: str, workers: int, capacity: float) -> Cell:
    """Others know the workers' prefill rate from the beginning, as in the simulator they are compared with."""
    cell = Setup().cell(trace, policy, workers, capacity=capacity)
    return cell if policy == OURS else replace(cell, scenario=replace(cell.scenario, knows_rates=True))


def _policies(workers: int, capacity: float, trace: Trace) -> Sequence[str]:
    """All in the large table, elsewhere ours and the bounds."""
    is_main = (workers, capacity) == (MAIN, 0.25 if trace.is_closed_loop else 0.10)
    return NAMES if is_main else (OURS, POOLED, POOLED_SLICES)


def _run(cells: Sequence[Cell], seeds: Sequence[int], many: Sequence[int]) -> list[list[Row]]:
    """Of each cell a row for each seed, of `many` where the figures scatter."""
    of_cell = [many if thrashes(cell.trace.name, cell.policy) else seeds for cell in cells]
    by_seed = {
        seed: run_cells(
            [cell for cell, those in zip(cells, of_cell, strict=True) if seed in those], (seed,), jobs=usable_cores()
        )
        for seed in sorted({seed for those in of_cell for seed in those})
    }
    rows = {seed: iter(of_seed) for seed, of_seed in by_seed.items()}
    return [[next(rows[seed]) for seed in those] for those in of_cell]


def _results(
    measured: Sequence[Sequence[Row]], asked: Mapping[tuple[str, int, float], Wanted]
) -> tuple[list[Table], list[Floor]]:
    found: dict[tuple[str, int, float], dict[str, Sequence[Outcome]]] = {}
    for rows in measured:
        cell = rows[0].cell
        key = (cell.trace.name, cell.scenario.num_workers, cell.capacity)
        found.setdefault(key, {})[cell.policy] = [row.outcome for row in rows]
    shown = [_shown(key, policies) for key, policies in found.items()]
    table = Table(title="Simulated fleets, means over the seeds", rows=[row for rows in shown for row in rows])
    floors = [floor for key, wanted in asked.items() for floor in _floors(key, wanted, found[key])]
    compared = {
        (name, policy): outcomes
        for (name, workers, capacity), policies in found.items()
        if workers == MAIN and len(policies) == len(NAMES)
        for policy, outcomes in policies.items()
    }
    if not compared:
        return [table], floors
    agreeing, its_floors = agreement(compared)
    return [table, agreeing], [*floors, *its_floors]


def _shown(key: tuple[str, int, float], policies: Mapping[str, Sequence[Outcome]]) -> list[Mapping[str, object]]:
    name, workers, capacity = key
    bound = _means(policies[POOLED])
    rows: list[Mapping[str, object]] = []
    for policy, outcomes in policies.items():
        mean = _means(outcomes)
        rows.append(
            {
                "trace": name,
                "workers": workers,
                "capacity": capacity,
                "policy": policy,
                "hit rate": mean["hit_rate"],
                "of the bound": mean["hit_rate"] / bound["hit_rate"],
                "mean s": mean["ttft_mean_s"],
                "p50 s": mean["ttft_p50_s"],
                "p90 s": mean["ttft_p90_s"],
                "p99 s": mean["ttft_p99_s"],
                "mean, p50, p99 over the bound": tuple(
                    mean[figure] / bound[figure] for figure in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")
                ),
                "imbalance": mean["imbalance"],
                "busy": mean["utilisation"],
            }
        )
    return rows


def _floors(key: tuple[str, int, float], wanted: Wanted, policies: Mapping[str, Sequence[Outcome]]) -> list[Floor]:
    name, workers, capacity = key
    ours, bound = _means(policies[OURS]), _means(policies[POOLED])
    where = f"{name}, {workers} workers, {capacity:.0%}"
    floors: list[Floor] = []
    if wanted.hit is not None:
        lost = 1 - ours["hit_rate"] / bound["hit_rate"]
        floors.append(Floor(what=f"{where}: share of the bound's hit rate lost", value=lost, most=1 - wanted.hit))
    for figure, most in (("p50", wanted.p50), ("mean", wanted.mean), ("p99", wanted.p99)):
        if most is not None:
            ratio = ours[f"ttft_{figure}_s"] / bound[f"ttft_{figure}_s"]
            floors.append(Floor(what=f"{where}: {figure} over the bound's", value=ratio, most=most))
    if wanted.p50_s is not None:
        floors.append(Floor(what=f"{where}: p50, s", value=ours["ttft_p50_s"], most=wanted.p50_s))
    return floors


def _means(outcomes: Sequence[Outcome]) -> Mapping[str, float]:
    names = ("hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "imbalance", "utilisation")
    return {name: sum(getattr(outcome, name) for outcome in outcomes) / len(outcomes) for name in names}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a smoke on small parts of traces, floors not judged")
    quick: bool = options.parse_args().quick
    began_s = time.monotonic()
    tables, floors = measure_traces(quick=quick)
    for table in tables:
        table.show()
    name = "routing-traces-quick" if quick else "routing-traces"
    report(name, tables, floors, about={"took_s": round(time.monotonic() - began_s)}, judged=not quick)


if __name__ == "__main__":
    main()
