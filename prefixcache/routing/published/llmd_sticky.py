"""llm-d's "sticky until saturated": whoever has nearly all of the prompt, unless it has much more to prefill."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision, least_of
from prefixcache.routing.rates import usual_rate

AFFINITY = 0.8
"""Of the blocks that may be reused; its default."""
SATURATED_S = 10.0
"""Seconds of prefill, beyond those of the least loaded worker, at which affinity gives way."""


class LlmdSticky(Policy):
    """Scores are tokens to prefill before the answer, those of waiting requests included; less is better."""

    name = "llmd_sticky"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        usual = usual_rate(workers)
        waiting_tokens: dict[str, float] = {}
        scores: dict[str, float] = {}
        for worker in workers:
            waiting = worker.all_ahead_s * (worker.prefill_rate or usual)
            waiting_tokens[worker.worker_id] = waiting
            scores[worker.worker_id] = waiting + worker.uncached_tokens(request)
        least = min(waiting_tokens[worker.worker_id] for worker in among)
        enough_tokens = AFFINITY * max(request.block_tokens, _reusable_tokens(request))
        if warm := [worker for worker in among if worker.hit_tokens >= enough_tokens]:
            chosen = least_of(warm, scores, self._random)
            beyond = waiting_tokens[chosen.worker_id] - least
            if beyond <= SATURATED_S * (chosen.prefill_rate or usual):
                return decision(chosen, among, scores)
        return decision(least_of(among, scores, self._random), among, scores)


def _reusable_tokens(request: RoutingRequest) -> float:
    """In whole blocks; one token at least is always computed."""
    return (request.prompt_tokens - 1) // request.block_tokens * request.block_tokens
