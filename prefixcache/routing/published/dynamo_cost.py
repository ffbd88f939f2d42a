"""Dynamo's KV router: the fewest blocks to compute and to hold, taken together."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision, least_of
from prefixcache.routing.rates import usual_rate

OVERLAP_WEIGHT = 1.0
"""Of a block to compute against a block to hold; its default."""


class DynamoCost(Policy):
    """Scores are blocks: those to prefill, waiting ones included, and those of all requests there; less is better."""

    name = "dynamo_cost"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        usual = usual_rate(workers)
        scores: dict[str, float] = {}
        for worker in workers:
            waiting_tokens = worker.all_ahead_s * (worker.prefill_rate or usual)
            to_prefill = OVERLAP_WEIGHT * (waiting_tokens + worker.uncached_tokens(request))
            to_hold = worker.running_tokens + request.prompt_tokens
            scores[worker.worker_id] = (to_prefill + to_hold) / request.block_tokens
        return decision(least_of(among, scores, self._random), among, scores)
