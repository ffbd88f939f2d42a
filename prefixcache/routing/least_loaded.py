"""Least loaded: to the worker with the fewest requests, whatever it holds."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision


class LeastLoaded(Policy):
    """Ties go to the least prefill ahead, then to a random worker. Scores are requests; less is better."""

    name = "least_loaded"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        scores = {worker.worker_id: float(worker.num_waiting + worker.num_running) for worker in workers}
        least = min(scores[worker.worker_id] for worker in among)
        fewest = [worker for worker in among if scores[worker.worker_id] == least]
        least_s = min(worker.all_ahead_s for worker in fewest)
        chosen = self._random.choice([worker for worker in fewest if worker.all_ahead_s == least_s])
        return decision(chosen, among, scores)
