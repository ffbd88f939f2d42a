"""What something took: by the clock, and by the CPU of this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil

Spread = tuple[float, float, float]
"""Least, median and greatest of some repeats."""


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    return ordered[0], statistics.median(ordered), ordered[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds."""

    cpu_s: float
    """Of all threads: with one that computes it is what the clock shows on a machine with nothing else to do."""
    wall_s: float

    @classmethod
    def median(cls, costs: Sequence[Cost]) -> Cost:
        """Of each for itself."""
        return cls(
            cpu_s=statistics.median(cost.cpu_s for cost in costs),
            wall_s=statistics.median(cost.wall_s for cost in costs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point in time."""

    cpu_s: float
    wall_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(cpu_s=time.process_time(), wall_s=time.perf_counter())

    def __sub__(self, earlier: Moment) -> Cost:
        return Cost(cpu_s=self.cpu_s - earlier.cpu_s, wall_s=self.wall_s - earlier.wall_s)


def cost_of(call: Callable[[], object]) -> Cost:
    began = Moment.now()
    call()
    return Moment.now() - began


class ProgramClock:
    """The CPU of programs and of all that they started, in place of this process'."""

    def __init__(self, *pids: int) -> None:
        programs = [psutil.Process(pid) for pid in pids]
        processes = [process for program in programs for process in (program, *program.children(recursive=True))]
        self._clocks = [~process.pid << 3 | 2 for process in processes]  # clock_getcpuclockid(3): of a whole process

    def now(self) -> Moment:
        return Moment(cpu_s=sum(map(time.clock_gettime, self._clocks)), wall_s=time.perf_counter())
