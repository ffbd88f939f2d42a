"""Cells: one policy on one trace and one fleet, over several seeds, each of them a row of the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from prefixcache.simulation.mechanisms import Mechanisms
from prefixcache.simulation.outcome import Outcome, outcome
from prefixcache.simulation.policies import new_fleet
from prefixcache.simulation.scenario import Scenario
from prefixcache.simulation.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is run."""

    trace: Trace
    policy: str
    scenario: Scenario
    mechanisms: Mechanisms | None
    """None: those that the policy usually has."""
    capacity: float
    """Of all caches, as a share of the trace's unique blocks."""
    load: float | None
    """That the prefill rate was made for; None where it was given."""
    arrival_speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cell and the means of its outcomes over the seeds."""

    cell: Cell
    outcome: Outcome
    seeds: Sequence[int]

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        cell = self.cell
        return {
            "trace": cell.trace.name,
            "policy": cell.policy,
            "workers": cell.scenario.num_workers,
            "capacity": cell.capacity,
            "capacity_tokens": cell.scenario.capacity_blocks * cell.trace.block_tokens,
            "load": cell.load,
            "arrival_speed": cell.arrival_speed,
            "prefill_rate": cell.scenario.costs.prefill_rate,
            "requests": len(cell.trace.requests),
            "seeds": list(self.seeds),
            **asdict(self.outcome),
        }


def run_cells(cells: Sequence[Cell], seeds: Sequence[int], *, jobs: int) -> list[Row]:
    """In the order of `cells`; `jobs` processes share the runs."""
    tasks = [(cell, seed) for cell in cells for seed in seeds]
    if jobs == 1 or len(tasks) == 1:
        outcomes = [_run(*task) for task in tasks]
    else:
        with ProcessPoolExecutor(min(jobs, len(tasks))) as processes:
            outcomes = list(processes.map(_run, *zip(*tasks, strict=True)))
    step = len(seeds)
    return [
        Row(cell=cell, outcome=_mean(outcomes[number * step : (number + 1) * step]), seeds=seeds)
        for number, cell in enumerate(cells)
    ]


def _run(cell: Cell, seed: int) -> Outcome:
    fleet = new_fleet(cell.policy, cell.trace, cell.scenario, cell.mechanisms, seed=seed)
    fleet.run()
    return outcome(fleet)


def _mean(outcomes: Iterable[Outcome]) -> Outcome:
    of_all = list(outcomes)
    return Outcome(**{field.name: fmean(getattr(each, field.name) for each in of_all) for field in fields(Outcome)})
