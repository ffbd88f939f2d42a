"""Longest prefix first: to the worker that has most of the prompt, whatever its load."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot


class LongestPrefix(Policy):
    """Ties go to the least waiting, then the least running, then a random worker. Scores are hit tokens."""

    name = "longest_prefix"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        if not workers:
            raise ValueError("no worker to choose from")
        longest = max(worker.hit_tokens for worker in workers)
        holders = [worker for worker in workers if worker.hit_tokens == longest]
        least = min((worker.num_waiting, worker.num_running) for worker in holders)
        chosen = self._random.choice([w for w in holders if (w.num_waiting, w.num_running) == least])
        if longest == 0:
            reason = "least_waiting"
        elif len(holders) == 1:
            reason = "longest_prefix"
        else:
            reason = "longest_prefix_least_waiting"
        return Decision(
            worker_id=chosen.worker_id,
            reason=reason,
            hit_tokens=chosen.hit_tokens,
            scores={worker.worker_id: float(worker.hit_tokens) for worker in workers},
        )
