"""Least estimated time of arrival: to the worker that would have prefilled the prompt first."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, reason_for
from prefixcache.routing.rates import prefill_rates

NEAR_TIE = 0.10
NEAR_TIE_S = 0.010
"""Estimates within the larger of the two (a fraction of the least, seconds) of each other are taken for equal."""
EVICTION_PRICE = 2.0
CROWDING_PRICE = 1.0
"""Tokens computed that a token evicted, or held beyond a worker's share, is worth; `make bench-routing` shows both."""
CROWDED_FROM = 0.125
"""Where all caches together are less full than this, crowding counts in proportion: there is room enough."""


class Eta(Policy):
    """Scores are seconds until the prompt is prefilled: what is ahead + uncached tokens / prefill rate; less is better.

    The estimates are no better than a tenth, and rates are noisy, so near ties go by what is exact: the fewest tokens
    to compute, then the fewest requests there, then chance. Of equal prompts that come at once all but the first
    therefore meet where that one is prefilled already, though it takes them as long as to begin anew elsewhere, until
    what they bring along themselves outweighs a tenth of the prefill; and an idle fleet computes nothing twice for
    the sake of milliseconds.

    Where all capacities are known, two prices of memory come on top, as the seconds that computing so many tokens
    takes: what must be evicted for the prompt (likely to be computed once more), and what a cache holds beyond its
    share of all. Without the second, all chats behind one system prompt follow it to one worker, whose cache later
    overflows while others are half empty: nothing is full yet when they begin, so that nothing is evicted then.
    """

    name = "eta"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        rates = prefill_rates(workers)
        prices = _memory_prices(request, workers)
        scores = {
            worker.worker_id: worker.ahead_s + (worker.uncached_tokens(request) + price) / rates[worker.worker_id]
            for worker, price in zip(workers, prices, strict=True)
        }
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


def _memory_prices(request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Sequence[float]:
    """For each worker, in tokens computed; nothing where a capacity is not known."""
    capacities = [worker.capacity_tokens for worker in workers if worker.capacity_tokens]
    if len(capacities) < len(workers):
        return [0.0] * len(workers)
    fill = sum(worker.held_tokens for worker in workers) / sum(capacities)
    crowding_price = CROWDING_PRICE * min(fill / CROWDED_FROM, 1.0)
    prices: list[float] = []
    for worker, capacity in zip(workers, capacities, strict=True):
        uncached_tokens = worker.uncached_tokens(request)
        evicted_tokens = min(max(worker.held_tokens + uncached_tokens - capacity, 0.0), uncached_tokens)
        crowding_tokens = max(worker.held_tokens - fill * capacity, 0.0)
        prices.append(EVICTION_PRICE * evicted_tokens + crowding_price * crowding_tokens)
    return prices
