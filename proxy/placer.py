"""Places the prompts of a request, one after the other: each by its own prefix, and by the load that all before it are.

match ──► expectations + load ──► policy ──► reservation ──long prefill──► commit ──tells of a deeper prefix──┐
                 ▲                                └──short one──► post                                        │
                 └────────────────────────── once more, and then post ────────────────────────────────────────┘
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import Match
from prefixcache.index.boundaries import Boundaries
from prefixcache.limits import SHORT_PREFILL_TOKENS
from prefixcache.metrics import ProxyMetrics
from prefixcache.routing.base import Policy
from proxy.expectation import expectations
from proxy.fleet import Fleet
from proxy.load_table import LoadTable
from proxy.model import Model
from proxy.own_claims import OwnClaims
from proxy.placement import Placement, placement
from proxy.prediction import Predictor, Prompt
from proxy.recent_placements import RecentPlacements
from proxy.reservation import Reservation
from proxy.sampling_fields import GenerationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedPrompt:
    """A prompt with its worker, and its place there."""

    placement: Placement
    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One prompt on its way to a worker."""

    model: Model
    prompt: Prompt
    boundaries: Boundaries
    match: Match | None
    options: GenerationOptions
    number: int
    """Among all prompts of this process."""


class Placer:
    """One for the process; a request leaves nothing here but what its process may remember of where it went."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        predictor: Predictor,
        policy: Policy,
        loads: LoadTable,
        recent: RecentPlacements,
        proxy_id: str,
        metrics: ProxyMetrics,
    ) -> None:
        self._fleet = fleet
        self._predictor = predictor
        self._policy = policy
        self._loads = loads
        self._recent = recent
        self._proxy_id = proxy_id
        self._metrics = metrics
        self._own_claims = OwnClaims()
        self._numbers = itertools.count(1)

    async def place(
        self, model: Model, prompts: Sequence[Prompt], options: GenerationOptions, scopes: ExitStack
    ) -> Sequence[ReservedPrompt]:
        """The reservations belong to `scopes`. Raises Unavailable, ContextLengthExceeded."""
        candidates = self._loads.least_loaded(self._fleet.ready_links(model.namespace))
        matches = await self._predictor.all_matches(model.index, prompts, candidates)
        for match in matches:
            if match is not None:
                self._loads.merge(match.loads)
        return [
            await self._place_one(model, prompt, match, options, scopes)
            for prompt, match in zip(prompts, matches, strict=True)
        ]

    async def _place_one(
        self, model: Model, prompt: Prompt, match: Match | None, options: GenerationOptions, scopes: ExitStack
    ) -> ReservedPrompt:
        asked = _Asked(
            model=model,
            prompt=prompt,
            boundaries=Boundaries.of(prompt.index_hashes),
            match=match,
            options=options,
            number=next(self._numbers),
        )
        reservation = scopes.enter_context(
            Reservation(
                model.index,
                asked.boundaries,
                own_claims=self._own_claims,
                number=asked.number,
                proxy_id=self._proxy_id,
                num_choices=options.n,
                metrics=self._metrics,
            )
        )
        placed = self._choose(asked)
        _take(reservation, placed)
        is_long = placed.uncached_tokens >= SHORT_PREFILL_TOKENS
        if match is not None and is_long and reservation.has_claims_to_write:
            placed = self._reconsidered(asked, reservation, placed, await self._commit(reservation))
        else:
            reservation.post()
        self._recent.record(asked.boundaries, placed.link.process)
        self._count(placed, match)
        return ReservedPrompt(placement=placed, reservation=reservation)

    def _choose(self, asked: _Asked, newer: Mapping[int, int] = MappingProxyType({})) -> Placement:
        model, prompt = asked.model, asked.prompt
        links = self._fleet.ready_links(model.namespace)
        return placement(
            self._policy,
            links,
            expectations(links, prompt.index_hashes, self._known(asked), self._recent, newer),
            self._loads,
            geometry=model.geometry,
            prompt_tokens=prompt.num_tokens,
            max_tokens=asked.options.max_tokens,
            usual_max_tokens=asked.options.usual_max_tokens,
            field=prompt.field,
        )

    def _known(self, asked: _Asked) -> Match | None:
        """The match and, fresher, what this process itself has placed since."""
        own = self._own_claims.depths(asked.boundaries, asked.number)
        match = asked.match
        if not own or match is None:
            return match
        deeper = {incarnation: max(depth, match.pending.get(incarnation, 0)) for incarnation, depth in own.items()}
        return replace(match, pending={**match.pending, **deeper})

    async def _commit(self, reservation: Reservation) -> Mapping[int, int]:
        """What others have pending; nothing where the index does not say."""
        began = time.perf_counter()
        try:
            return await reservation.commit()
        except IndexUnavailable:
            self._metrics.index_commit_failures.inc()
            return {}
        finally:
            self._metrics.index_commit.observe(time.perf_counter() - began)

    def _reconsidered(
        self, asked: _Asked, reservation: Reservation, placed: Placement, others: Mapping[int, int]
    ) -> Placement:
        """The choice made once more, without its own load, where others were faster than the match."""
        known = self._known(asked) or Match()
        newer = {
            link.incarnation: others[link.incarnation]
            for link in self._fleet.ready_links(asked.model.namespace)
            if others.get(link.incarnation, 0)
            > max(known.depths.get(link.incarnation, 0), known.pending.get(link.incarnation, 0))
        }
        if not newer:
            return placed
        reservation.leave()
        again = self._choose(asked, newer)
        _take(reservation, again)
        reservation.post()
        if again.link is not placed.link:
            reservation.post_load_of(placed.link)
        self._metrics.rescored_decisions.labels("kept" if again.link is placed.link else "moved").inc()
        return again

    def _count(self, placed: Placement, match: Match | None) -> None:
        self._metrics.routing_decisions.labels(self._policy.name, placed.decision.reason).inc()
        if match is None:
            self._metrics.own_placement_decisions.labels("no_answer").inc()
        elif placed.expectation.source == "own_placements":
            self._metrics.own_placement_decisions.labels("announced_again").inc()


def _take(reservation: Reservation, placed: Placement) -> None:
    reservation.take(placed.link, prefill_s=placed.prefill_s, claimed_blocks=placed.expectation.claimed_blocks)
