"""Least estimated time of arrival: to the worker that would have prefilled the prompt first."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, reason_for
from prefixcache.routing.rates import prefill_rates

NEAR_TIE = 0.10
NEAR_TIE_S = 0.010
"""Estimates within the larger of the two (a fraction of the least, seconds) of each other are taken for equal."""


class Eta(Policy):
    """Scores are seconds until the prompt is prefilled: what is ahead + uncached tokens / prefill rate; less is better.

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
        rates = prefill_rates(workers)
        scores = {
            worker.worker_id: worker.ahead_s + worker.uncached_tokens(request) / rates[worker.worker_id]
            for worker in workers
        }
        among = candidates(workers)
        least = min(scores[worker.worker_id] for worker in among)
        most = least + max(NEAR_TIE * least, NEAR_TIE_S)
        near = [worker for worker in among if scores[worker.worker_id] <= most]
        best = min(map(_exact_order, near))
        chosen = self._random.choice([worker for worker in near if _exact_order(worker) == best])
        return Decision(
            worker_id=chosen.worker_id, reason=reason_for(chosen, among), hit_tokens=chosen.hit_tokens, scores=scores
        )


def _exact_order(worker: WorkerSnapshot) -> tuple[int, int]:
    return -worker.hit_tokens, worker.num_waiting + worker.num_running
