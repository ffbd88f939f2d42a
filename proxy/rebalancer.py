"""Gives a worker that has nothing to do a request of this proxy that waits for another one.

idle beat ──► requests not started elsewhere ──pure choice──► abort {if_waiting} to its worker
                                                                 ├── end aborted ──► generate to the idle worker
                                                                 └── started ──────► it stays
One request at a time for an idle worker. Several proxies may each move one to it: harmless, for it orders them.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import get_args

from prefixcache.limits import MAX_STEAL_CANDIDATES
from prefixcache.load import NUM_WAITING_CLASSES, waiting_class
from prefixcache.metrics import ProxyMetrics
from prefixcache.routing.order import order_key
from prefixcache.routing.steal import Waiting, to_steal
from proxy.generation import Generation, MoveOutcome
from proxy.load_table import LoadTable
from proxy.placement import fits
from proxy.placer import Placer
from proxy.worker_link import WorkerLink


class Rebalancer:
    """One for the process; generations enter and leave `movable` by themselves."""

    def __init__(
        self,
        *,
        placer: Placer,
        loads: LoadTable,
        metrics: ProxyMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: that of `received_at`."""
        self._placer = placer
        self._loads = loads
        self._metrics = metrics
        for outcome in get_args(MoveOutcome):
            metrics.steals.labels(outcome)
        self._clock = clock
        self._bound_for: set[WorkerLink] = set()
        """Workers to which a request is on its way."""
        self.movable: set[Generation] = set()

    def offer(self, idle: WorkerLink) -> None:
        """Moves to this worker, which says that it has nothing to prefill, the request that gains most, if any does."""
        ledger = idle.ledger
        if (
            not self.movable
            or idle in self._bound_for
            or not idle.ready
            or idle.is_silent
            or idle.breaker.is_open
            or ledger.num_waiting
            or ledger.num_prefilling
            or self._loads.is_draining(idle)
        ):
            return
        candidates = self._with_most_ahead(idle)
        if not candidates:
            return
        rate = self._placer.prefill_rate(candidates[0][1].whereabouts.asked.wanted, idle)
        chosen = to_steal(map(partial(self._waiting, idle, rate), candidates))
        if chosen is not None:
            self._bound_for.add(idle)
            chosen.move_to(idle, partial(self._settled, idle))

    def _settled(self, idle: WorkerLink, outcome: MoveOutcome) -> None:
        self._bound_for.discard(idle)
        self._metrics.steals.labels(outcome).inc()

    def _with_most_ahead(self, idle: WorkerLink) -> Sequence[tuple[float, Generation]]:
        """Those the idle worker may have, with the seconds of prefill before each."""
        by_link: dict[WorkerLink, list[Generation]] = {}
        for generation in self.movable:
            by_link.setdefault(generation.whereabouts.placement.link, []).append(generation)
        waiting: list[tuple[float, Generation]] = []
        for link, generations in by_link.items():
            # One that is silent would not answer, and keep the idle one waiting.
            if link is not idle and link.namespace == idle.namespace and not link.is_silent:
                waiting += self._ahead(link, generations)
        allowed = [each for each in waiting if _fits(each[1], idle)]
        return heapq.nlargest(MAX_STEAL_CANDIDATES, allowed, key=lambda each: each[0])

    def _ahead(self, link: WorkerLink, generations: Iterable[Generation]) -> Sequence[tuple[float, Generation]]:
        """Seconds of prefill that the worker does before each of these, which wait there and go by the usual order.

        What others wait with is known by classes: of those up to its own all is ahead, but these themselves are known
        one by one.
        """
        rest_s, waiting_s = self._loads.ahead(link)
        now = self._clock()
        last_first = sorted(generations, key=lambda each: _key(each, now), reverse=True)
        behind_s = [0.0] * NUM_WAITING_CLASSES
        ahead: list[tuple[float, Generation]] = []
        for generation in last_first:
            prefill_s = generation.whereabouts.placement.prefill_s
            place = waiting_class(prefill_s)
            behind_s[place] += prefill_s
            up_to = place + 1
            ahead.append((rest_s + max(sum(waiting_s[:up_to]) - sum(behind_s[:up_to]), 0.0), generation))
        return ahead

    def _waiting(self, idle: WorkerLink, rate: float, candidate: tuple[float, Generation]) -> Waiting[Generation]:
        ahead_s, generation = candidate
        whereabouts = generation.whereabouts
        asked = whereabouts.asked
        expected = self._placer.expectation_on(asked, idle)
        num_tokens = asked.wanted.num_tokens
        hit_tokens = asked.wanted.geometry.predicted_hit_tokens(expected.blocks, num_tokens)
        return Waiting(
            request=generation,
            ahead_s=ahead_s,
            prefill_there_s=whereabouts.placement.prefill_s,
            prefill_here_s=(num_tokens - hit_tokens) / rate,
        )


def _key(generation: Generation, now: float) -> float:
    whereabouts = generation.whereabouts
    return order_key("mean", prefill_s=whereabouts.placement.prefill_s, waited_s=now - whereabouts.received_at)


def _fits(generation: Generation, link: WorkerLink) -> bool:
    wanted = generation.whereabouts.asked.wanted
    return fits(link, wanted.num_tokens, wanted.max_tokens)
