"""Least estimated time of arrival: to the worker that would have prefilled the prompt first."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision
from prefixcache.routing.memory_prices import displaced_price_tokens, sharing_prices_tokens
from prefixcache.routing.rates import usual_rate

NEAR_TIE = 0.10
NEAR_TIE_S = 0.010
"""Estimates within the larger of the two (a fraction of the least, seconds) of each other are taken for equal."""
RATE_TRUST = 1 / 3
"""Power of what a worker's rate is, of the usual one, that is believed: s^2 / (s^2 + e^2), where true rates of a fleet
differ by s = 0.35 (one half twice as fast as the other) and measured ones are off by e = 0.5, both lognormal.

By simulation: with such errors the mean TTFT is 1.1 times that without, where full trust makes it 1.5 to 2; rates that
do differ two to one cost nothing, because idle workers take over what waits for slow ones."""


class Eta(Policy):
    """Scores are seconds: what is ahead + uncached tokens / prefill rate + the price of the memory; less is better.

    Ahead are the rest of what runs and the waiting prefills no longer than its own, because short ones go first.
    Rates are shrunk towards the usual one: a worker that takes itself for faster than it is also takes its queue for
    shorter, and nothing else would keep requests away from it.

    The estimates are no better than a tenth, and rates are noisy, so near ties go by what is exact: the fewest tokens
    to compute, then the fewest requests there, then chance. Of equal prompts that come at once all but the first
    therefore meet where that one is prefilled already, though it takes them as long as to begin anew elsewhere, until
    what they bring along themselves outweighs a tenth of the prefill; and an idle fleet computes nothing twice for
    the sake of milliseconds.
    """

    name = "eta"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        scores = _scores_s(request, workers)
        least = min(scores[worker.worker_id] for worker in among)
        most = least + max(NEAR_TIE * least, NEAR_TIE_S)
        near = [worker for worker in among if scores[worker.worker_id] <= most]
        orders = [_exact_order(worker) for worker in near]
        best = min(orders)
        chosen = self._random.choice([worker for worker, order in zip(near, orders, strict=True) if order == best])
        return decision(chosen, among, scores)


def _exact_order(worker: WorkerSnapshot) -> tuple[int, int]:
    return -worker.hit_tokens, worker.num_requests


def _scores_s(request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> dict[str, float]:
    usual = usual_rate(workers)
    uncached = [worker.uncached_tokens(request) for worker in workers]
    sharing = sharing_prices_tokens(workers, uncached, request.prompt_tokens)
    scores: dict[str, float] = {}
    for place, worker in enumerate(workers):
        told = worker.prefill_rate or usual
        uncached_tokens = uncached[place]
        tokens = uncached_tokens + displaced_price_tokens(worker, uncached_tokens)
        if sharing is not None:
            tokens += sharing[place]
        # Its own rate made seconds of what is ahead, and makes tokens of them again.
        tokens += worker.ahead_s(uncached_tokens / told) * told
        scores[worker.worker_id] = tokens / (usual * (told / usual) ** RATE_TRUST)
    return scores
