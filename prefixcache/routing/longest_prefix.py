"""Longest prefix first: to the worker that has most of the prompt, whatever its load."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision


class LongestPrefix(Policy):
    """Ties go to the fewest requests, then to a random worker.

    Scores are hit tokens; more is better.
    """

    name = "longest_prefix"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        best = min(map(_order, among))
        chosen = self._random.choice([worker for worker in among if _order(worker) == best])
        return decision(chosen, among, {worker.worker_id: float(worker.hit_tokens) for worker in workers})


def _order(worker: WorkerSnapshot) -> tuple[int, int]:
    return -worker.hit_tokens, worker.num_requests
