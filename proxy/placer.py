"""Places the prompts of a request, one after the other: each by its own prefix, and by the load that all before it are.

match ──► expectations + load ──► policy ──► reservation ──long prefill──► commit ──tells of a deeper prefix──┐
                 ▲                                └──short one──► post                                        │
                 └────────────────────────── once more, and then post ────────────────────────────────────────┘

What was placed may have to go elsewhere: refused or failed by its worker, or moved to an idle one. That goes by what is
known already, so that it happens at once; a prompt of several choices sends each of them on its own way.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Generic, get_args

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import Match, PrefixIndex
from prefixcache.index.boundaries import Boundaries
from prefixcache.limits import SHORT_PREFILL_TOKENS
from prefixcache.metrics import ProxyMetrics
from prefixcache.routing.base import Decision, Policy, Reason, WorkerSnapshot
from prefixcache.routing.rates import prefill_rates
from proxy.destination import Geometry
from proxy.expectation import NO_ANSWER, NOTHING, Expectation, claimed_blocks, expectations
from proxy.fleet import Fleet
from proxy.load_table import LoadTable
from proxy.model import Model
from proxy.own_claims import OwnClaims
from proxy.placement import D, Placement, placement, placement_on
from proxy.prediction import Predictor, Prompt
from proxy.recent_placements import RecentPlacements
from proxy.reservation import Reservation
from proxy.sampling_fields import GenerationOptions
from proxy.worker_link import WorkerLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Generic[D]):
    """One prompt that wants a place, and the places there are."""

    index: PrefixIndex
    ready: Callable[[], Sequence[D]]
    """The destinations of now."""
    geometry: Geometry
    index_hashes: Sequence[int]
    num_tokens: int
    num_choices: int = 1
    max_tokens: int | None = None
    usual_max_tokens: int | None = None
    field: str = "messages"
    """Where the prompt stood in the request."""
    is_refused_elsewhere: bool = False
    """Whether a prompt that fits no destination goes all the same: the engine says so itself."""

    @property
    def least_room(self) -> int:
        """Tokens of context without which a destination is too small."""
        return self.num_tokens + (self.max_tokens or 1)

    def continued(self, num_output_tokens: int, most_tokens: int) -> Wanted[D]:
        """With what has been generated, which is computed like a prompt, and at most `most_tokens` to come.

        Where the client set no limit, a destination with less room does as well.
        """
        return replace(
            self,
            num_tokens=self.num_tokens + num_output_tokens,
            max_tokens=None if self.max_tokens is None else most_tokens,
            usual_max_tokens=most_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Generic[D]):
    """One prompt on its way to a worker, with what is known of it."""

    wanted: Wanted[D]
    boundaries: Boundaries
    match: Match | None
    number: int
    """Among all prompts of this process."""
    moment: int
    """Of the match, among the recent placements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedPrompt(Generic[D]):
    """A prompt with its worker, and its place there."""

    asked: Asked[D]
    placement: Placement[D]
    reservation: Reservation


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
        for reason in get_args(Reason):
            metrics.routing_decisions.labels(policy.name, reason)
        for cause in ("no_answer", "announced_again"):
            metrics.own_placement_decisions.labels(cause)
        self._own_claims = OwnClaims()
        self._numbers = itertools.count(1)

    async def place(
        self, model: Model, prompts: Sequence[Prompt], options: GenerationOptions, scopes: ExitStack
    ) -> Sequence[ReservedPrompt[WorkerLink]]:
        """The reservations belong to `scopes`. Raises Unavailable, ContextLengthExceeded."""
        ready = partial(self._fleet.ready_links, model.namespace)
        wanted = [
            Wanted(
                index=model.index,
                ready=ready,
                geometry=model.geometry,
                index_hashes=prompt.index_hashes,
                num_tokens=prompt.num_tokens,
                num_choices=options.n,
                max_tokens=options.max_tokens,
                usual_max_tokens=options.usual_max_tokens,
                field=prompt.field,
            )
            for prompt in prompts
        ]
        candidates = self._loads.least_loaded(ready())
        matches = await self._predictor.all_matches(model.index, prompts, candidates)
        for match in matches:
            if match is not None:
                self._loads.merge(match.loads)
        return [await self._place_one(each, match, scopes) for each, match in zip(wanted, matches, strict=True)]

    async def place_wanted(self, wanted: Wanted[D], scopes: ExitStack) -> ReservedPrompt[D]:
        """As `place`, of one prompt that says itself where it may go."""
        match = await self._predictor.match(wanted.index, wanted.index_hashes, self._loads.least_loaded(wanted.ready()))
        if match is not None:
            self._loads.merge(match.loads)
        return await self._place_one(wanted, match, scopes)

    def takers(self, namespace: str, besides: Callable[[WorkerLink], bool]) -> Sequence[WorkerLink]:
        """To choose from for what must go elsewhere: of the workers that take requests now, none of those `besides`."""
        return self._fleet.ready_links(namespace, besides=lambda link: besides(link) or self._loads.is_draining(link))

    def most_room(self, namespace: str, besides: Callable[[WorkerLink], bool]) -> int:
        """The longest context among those that could be `takers`; 0 where there are none."""
        room = 0
        while links := self.takers(namespace, partial(_is_out, besides, room)):
            room = max(link.max_model_len for link in links)
        return room

    def known_links(self, namespace: str) -> Sequence[WorkerLink]:
        """Workers that take requests now, or may do so again."""
        return [link for link in self._fleet.links if link.namespace == namespace]

    def place_elsewhere(
        self,
        reserved: ReservedPrompt[D],
        takers: Sequence[D],
        scopes: ExitStack,
        *,
        wanted: Wanted[D] | None = None,
    ) -> ReservedPrompt[D]:
        """Once more, on one of the `takers`. Raises NoWorkerReady, ContextLengthExceeded.

        `wanted`: what has become of it meanwhile.
        """
        asked = replace(reserved.asked, wanted=wanted or reserved.asked.wanted)
        return self._moved(reserved, self._choose(asked, among=takers), scopes)

    def move(self, reserved: ReservedPrompt[D], link: D, scopes: ExitStack) -> ReservedPrompt[D]:
        """To a worker that has nothing to do, which need not be the best one for it."""
        wanted, expectation = reserved.asked.wanted, self.expectation_on(reserved.asked, link)
        hit_tokens = wanted.geometry.predicted_hit_tokens(expectation.blocks, wanted.num_tokens)
        placed = placement_on(
            link,
            Decision(worker_id=link.worker_id, reason="stolen", hit_tokens=hit_tokens),
            expectation,
            best_hit_tokens=reserved.placement.best_hit_tokens,
            prefill_rate=self.prefill_rate(wanted, link),
            prompt_tokens=wanted.num_tokens,
            max_tokens=wanted.max_tokens,
            usual_max_tokens=wanted.usual_max_tokens,
        )
        return self._moved(reserved, placed, scopes)

    def expectation_on(self, asked: Asked[D], link: D) -> Expectation:
        """What one worker has of the prompt: by the match, and by what this process has sent it since."""
        match = asked.match
        if match is not None:
            own = self._own_claims.depths(asked.boundaries, before=sys.maxsize)
            match = replace(match, pending={**match.pending, **_deeper(own, match)})
        expected = expectations([link], asked.wanted.index_hashes, match, self._recent).get(link.worker_id, NOTHING)
        since = self._recent.depth_since(asked.boundaries, link.process, asked.moment)
        return replace(expected, blocks=since, source="own_placements") if since > expected.blocks else expected

    def prefill_rate(self, wanted: Wanted[D], link: D) -> float:
        """Tokens a second; of a worker that has not measured it, what the others do."""
        workers = [
            WorkerSnapshot(worker_id=each.worker_id, prefill_rate=self._loads.prefill_rate(each))
            for each in {link, *wanted.ready()}
        ]
        return prefill_rates(workers)[link.worker_id]

    async def _place_one(self, wanted: Wanted[D], match: Match | None, scopes: ExitStack) -> ReservedPrompt[D]:
        asked = Asked(
            wanted=wanted,
            boundaries=Boundaries.of(wanted.index_hashes),
            match=match,
            number=next(self._numbers),
            moment=self._recent.num_recorded,
        )
        reservation = self._reservation(asked, wanted.num_choices, scopes)
        placed = self._choose(asked)
        _take(reservation, placed)
        # Before anything is written: what is told of the load tells of this prompt, too.
        self._loads.note_placed(placed.link, wanted.num_tokens, among=wanted.ready)
        is_long = placed.uncached_tokens >= SHORT_PREFILL_TOKENS
        if match is not None and is_long and reservation.has_claims_to_write:
            placed = self._reconsidered(asked, reservation, placed, await self._commit(reservation))
        else:
            reservation.post()
        self._recent.record(asked.boundaries, placed.link.process)
        self._count(placed, match)
        return ReservedPrompt(asked=asked, placement=placed, reservation=reservation)

    def _reservation(self, asked: Asked[D], num_choices: int, scopes: ExitStack) -> Reservation:
        return scopes.enter_context(
            Reservation(
                asked.wanted.index,
                asked.boundaries,
                own_claims=self._own_claims,
                number=asked.number,
                proxy_id=self._proxy_id,
                num_choices=num_choices,
                metrics=self._metrics,
            )
        )

    def _moved(self, reserved: ReservedPrompt[D], placed: Placement[D], scopes: ExitStack) -> ReservedPrompt[D]:
        """The reservation of a single choice moves; one of several choices gets its own, and the others stay."""
        asked, reservation = reserved.asked, reserved.reservation
        if len(reservation.choices) > 1:
            reservation.end_if_left()
            asked = replace(asked, number=next(self._numbers))
            reservation = self._reservation(asked, 1, scopes)
        _take(reservation, placed)
        reservation.post()
        if reservation is reserved.reservation:
            reservation.post_load_of(reserved.placement.link)
        self._recent.record(asked.boundaries, placed.link.process)
        return ReservedPrompt(asked=asked, placement=placed, reservation=reservation)

    def _choose(
        self, asked: Asked[D], newer: Mapping[int, int] = MappingProxyType({}), among: Sequence[D] | None = None
    ) -> Placement[D]:
        wanted = asked.wanted
        links = wanted.ready() if among is None else among
        return placement(
            self._policy,
            links,
            expectations(links, wanted.index_hashes, self._known(asked), self._recent, newer),
            self._loads,
            geometry=wanted.geometry,
            index_hashes=wanted.index_hashes,
            otherwise=NOTHING if asked.match is not None else NO_ANSWER,
            prompt_tokens=wanted.num_tokens,
            max_tokens=wanted.max_tokens,
            usual_max_tokens=wanted.usual_max_tokens,
            field=wanted.field,
            is_refused_elsewhere=wanted.is_refused_elsewhere,
        )

    def _known(self, asked: Asked[D]) -> Match | None:
        """The match and, fresher, what this process itself has placed since."""
        own = self._own_claims.depths(asked.boundaries, asked.number)
        match = asked.match
        if not own or match is None:
            return match
        return replace(match, pending={**match.pending, **_deeper(own, match)})

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
        self, asked: Asked[D], reservation: Reservation, placed: Placement[D], others: Mapping[int, int]
    ) -> Placement[D]:
        """The choice made once more, without its own load, where others were faster than the match."""
        known = self._known(asked) or Match()
        newer = {
            link.incarnation: others[link.incarnation]
            for link in asked.wanted.ready()
            if others.get(link.incarnation, 0)
            > max(claimed_blocks(link, known), known.pending.get(link.incarnation, 0))
        }
        if not newer:
            return placed
        reservation.leave()
        self._loads.note_left(placed.link, asked.wanted.num_tokens)
        again = self._choose(asked, newer)
        _take(reservation, again)
        self._loads.note_placed(again.link, asked.wanted.num_tokens, among=asked.wanted.ready)
        reservation.post()
        if again.link is not placed.link:
            reservation.post_load_of(placed.link)
        self._metrics.rescored_decisions.labels("kept" if again.link is placed.link else "moved").inc()
        return again

    def _count(self, placed: Placement[D], match: Match | None) -> None:
        self._metrics.routing_decisions.labels(self._policy.name, placed.decision.reason).inc()
        if match is None:
            self._metrics.own_placement_decisions.labels("no_answer").inc()
        elif placed.expectation.source == "own_placements":
            self._metrics.own_placement_decisions.labels("announced_again").inc()


def _is_out(besides: Callable[[WorkerLink], bool], room: int, link: WorkerLink) -> bool:
    return besides(link) or link.max_model_len <= room


def _deeper(own: Mapping[int, int], match: Match) -> Mapping[int, int]:
    return {incarnation: max(depth, match.pending.get(incarnation, 0)) for incarnation, depth in own.items()}


def _take(reservation: Reservation, placed: Placement[D]) -> None:
    reservation.take(placed.link, prefill_s=placed.prefill_s, claimed_blocks=placed.expectation.claimed_blocks)
