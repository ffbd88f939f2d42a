"""Each worker in its turn, whatever it holds: the baseline that the others are measured against."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision


class RoundRobin(Policy):
    """Its one state is whose turn was last, by name, so workers may come and go. It has no scores."""

    name = "round_robin"

    def __init__(self, random: random.Random) -> None:
        """`random` is not used: there are no ties."""
        self._last = ""

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        chosen = min(among, key=lambda worker: (worker.worker_id <= self._last, worker.worker_id))
        self._last = chosen.worker_id
        return decision(chosen, among, {worker.worker_id: 0.0 for worker in workers})
