"""What one decision costs, by the number of workers to choose from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from prefixcache.routing.base import Policy, RoutingRequest, WorkerSnapshot
from prefixcache.routing.policies import POLICIES
from tests.bench.report import Floor, Table
from tests.support.fleets import some_fleet, some_request

MOST_US = {16: 50.0, 64: None, 256: 300.0}
"""For one decision among so many workers, of the policy that takes longest."""
PROMPT_BLOCKS = 300
BATCH = 5
"""Decisions in a row: fewer than a clock can tell apart would be noise, more are interrupted by others."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "own workers": {"free_tokens": 4_000.0, "oldest_age_s": 60.0, "capacity_tokens": None, "is_draining": False},
    "plain engines": {"free_tokens": None, "capacity_tokens": 1_000_000.0, "is_draining": False},
}
"""What eta makes of each differs."""


def measure_deciding(num_repeats: int) -> tuple[Table, list[Floor]]:
    """CPU time of this thread; a busy machine shows in the median, not in the least."""
    random = Random("deciding")
    request = some_request(random, num_blocks=PROMPT_BLOCKS)
    rows: list[dict[str, object]] = []
    slowest_us = dict.fromkeys(MOST_US, 0.0)
    for kind, fields in KINDS.items():
        fleets = {size: some_fleet(random, size, most_blocks=PROMPT_BLOCKS, **fields) for size in MOST_US}
        for name, build in POLICIES.items():
            row: dict[str, object] = {"policy": name, "chooses among": kind}
            for size, fleet in fleets.items():
                times_us = _times_us(build(random), request, fleet, num_repeats)
                row[f"{size}: us least / median"] = (min(times_us), statistics.median(times_us))
                slowest_us[size] = max(slowest_us[size], min(times_us))
            rows.append(row)
    found = [
        Floor(what=f"microseconds of a decision among {size}", value=slowest_us[size], most=most_us)
        for size, most_us in MOST_US.items()
        if most_us is not None
    ]
    return Table(title="CPU of one decision", rows=rows), found


def _times_us(
    policy: Policy, request: RoutingRequest, workers: Sequence[WorkerSnapshot], num_repeats: int
) -> list[float]:
    times_us: list[float] = []
    for _ in range(num_repeats):
        began = time.thread_time_ns()
        for _ in range(BATCH):
            policy.choose(request, workers)
        times_us.append((time.thread_time_ns() - began) / BATCH / 1e3)
    return times_us
