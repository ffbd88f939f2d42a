"""Least estimated time to the first token, as several systems have it: all that waits is ahead, memory is free."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision, least_of
from prefixcache.routing.rates import usual_rate


class LeastTtft(Policy):
    """Scores are seconds; less is better, and equals share."""

    name = "least_ttft"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        usual = usual_rate(workers)
        scores = {
            worker.worker_id: worker.all_ahead_s + worker.uncached_tokens(request) / (worker.prefill_rate or usual)
            for worker in workers
        }
        return decision(least_of(among, scores, self._random), among, scores)
