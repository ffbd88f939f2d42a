"""What the policy is told, and which workers a request fits."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from prefixcache.errors import ContextLengthExceeded, NoWorkerReady, Unavailable
from prefixcache.index.base import Match
from prefixcache.index.boundaries import Boundaries
from prefixcache.load import IncarnationLoad, ProxyLoad
from prefixcache.routing.base import Decision, RoutingRequest, WorkerSnapshot
from prefixcache.routing.eta import Eta
from prefixcache.types import CacheGeometry
from proxy.expectation import NO_ANSWER, NOTHING, Expectation, expectations
from proxy.fleet import Fleet
from proxy.load_table import LoadTable
from proxy.placement import Placement, check_context, placement
from proxy.recent_placements import RecentPlacements
from proxy.store import Store
from proxy.warnings_log import QuietLog
from proxy.worker_link import WorkerLink
from tests.support.reservations import idle_link
from tests.unit.proxy.test_load_table import waits, worker_load

GEOMETRY = CacheGeometry()
CHAIN = list(range(101, 116))


class RecordingPolicy(Eta):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.told: list[tuple[RoutingRequest, dict[str, WorkerSnapshot]]] = []

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        self.told.append((request, {worker.worker_id: worker for worker in workers}))
        return super().choose(request, workers)


def _table() -> LoadTable:
    """One whose clock stands still."""
    log = QuietLog(logging.getLogger("test"))
    return LoadTable(cast(Store, None), cast(Fleet, None), "a" * 16, log, lambda: 1_000.0)


def _placed(
    links: Sequence[WorkerLink],
    expected: Mapping[str, Expectation] | None = None,
    table: LoadTable | None = None,
    **fields: Any,
) -> tuple[Placement[WorkerLink], RecordingPolicy]:
    policy = RecordingPolicy()
    arguments = {"prompt_tokens": 1000, "max_tokens": None, **fields}
    placed = placement(policy, links, expected or {}, table or _table(), geometry=GEOMETRY, **arguments)
    return placed, policy


def _expected(
    links: Sequence[WorkerLink], match: Match | None, recent: RecentPlacements | None = None
) -> Mapping[str, Expectation]:
    return expectations(links, CHAIN, match, recent or RecentPlacements())


def _remembering(link: WorkerLink, blocks: int) -> RecentPlacements:
    recent = RecentPlacements()
    recent.record(Boundaries.of(CHAIN[:blocks]), link.process)
    return recent


def test_a_match_belongs_to_the_incarnation_not_to_the_worker() -> None:
    links = [idle_link("old", incarnation=7), idle_link("new", incarnation=8)]
    expected = _expected(links, Match(depths={8: 3, 6: 15}))
    assert expected == {"new": Expectation(blocks=3, source="claims", claimed_blocks=3)}
    placed, policy = _placed(links, expected)
    assert placed.link is links[1]
    assert (placed.decision.hit_tokens, placed.uncached_tokens, placed.index_hit_tokens) == (192, 808, 192)
    assert placed.best_hit_tokens == 192
    ((request, told),) = policy.told
    assert request.prompt_tokens == 1000
    assert {worker_id: snapshot.hit_tokens for worker_id, snapshot in told.items()} == {"old": 0, "new": 192}


def test_what_another_one_had_is_kept_where_it_had_more_ahead() -> None:
    links = [idle_link("busy", incarnation=1), idle_link("idle", incarnation=2)]
    for _ in range(20):
        links[0].ledger.place(0.2)
    placed, _ = _placed(links, _expected(links, Match(depths={1: 12, 2: 3})))
    assert (placed.link.worker_id, placed.decision.reason) == ("idle", "least_ahead")
    assert (placed.decision.hit_tokens, placed.best_hit_tokens) == (3 * 64, 12 * 64)


def test_the_deeper_of_claims_and_pending_claims_counts() -> None:
    links = [idle_link("w1", incarnation=1), idle_link("w2", incarnation=2), idle_link("w3", incarnation=3)]
    match = Match(depths={1: 3, 2: 8}, pending={1: 12, 2: 8, 3: 1})
    assert _expected(links, match) == {
        "w1": Expectation(blocks=12, source="pending", claimed_blocks=3),
        "w2": Expectation(blocks=8, source="claims", claimed_blocks=8),
        "w3": Expectation(blocks=1, source="pending", claimed_blocks=0),
    }


def test_a_claim_that_is_newer_than_the_match_brings_its_prefill_along() -> None:
    """Nobody has told of that load yet: without it every proxy would take the worker for idle, and come."""
    links = [idle_link("w1", incarnation=1), idle_link("w2", incarnation=2)]
    match = Match(depths={1: 3})
    expected = expectations(links, CHAIN, match, RecentPlacements(), {1: 15})
    assert expected["w1"] == Expectation(blocks=15, source="pending", claimed_blocks=3, unbegun_blocks=12)
    placed, policy = _placed(links, expected)
    assert policy.told[0][1]["w1"].rest_s == pytest.approx(12 * 64 / 1_000)
    assert placed.link.worker_id == "w1"
    links[0].ledger.place(0.2)
    _, policy = _placed(links, expected)
    assert policy.told[0][1]["w1"].ahead_s(0.01) == pytest.approx(0.2 + 12 * 64 / 1_000), "however short it is itself"
    table = _table()
    table.merge({1: IncarnationLoad(proxies={"b": ProxyLoad(version=1, waiting_s=(0.0, 3.0, 0.0, 0.0, 0.0))})})
    _, policy = _placed(links, expected, table)
    told = policy.told[0][1]["w1"]
    assert (told.rest_s, told.ahead_s(1.0)) == (0.0, 3.2), "a fresher word may include it already"


def test_own_placements_speak_where_the_index_gave_no_answer() -> None:
    links = [idle_link("w1", incarnation=1), idle_link("w2", incarnation=2)]
    recent = _remembering(links[0], 12)
    assert _expected(links, Match(), recent) == {}, "the index knows better than to say nothing"
    expected = _expected(links, None, recent)
    assert expected == {"w1": Expectation(blocks=12, source="own_placements", claimed_blocks=0)}
    placed, _ = _placed(links, expected)
    assert (placed.link.worker_id, placed.decision.reason) == ("w1", "own_placements")
    assert (placed.decision.hit_tokens, placed.index_hit_tokens) == (768, 0), "no prediction of the index"


def test_own_placements_outlive_an_incarnation_while_its_claims_are_announced_again() -> None:
    link = idle_link("w1", incarnation=1)
    recent = _remembering(link, 12)
    link.update(idle_link("w1", incarnation=9).record)
    assert link.is_reannouncing
    assert _expected([link], Match(depths={9: 4}), recent) == {
        "w1": Expectation(blocks=12, source="own_placements", claimed_blocks=4)
    }
    assert _expected([link], Match(depths={9: 13}), recent)["w1"].source == "claims"
    restarted = idle_link("w1", incarnation=10, started_at=2.0)
    assert _expected([restarted], None, recent) == {}, "another process has another cache"


def test_the_policy_is_told_of_the_load() -> None:
    links = [idle_link("w1", incarnation=1), idle_link("w2", incarnation=2)]
    table = _table()
    links[0].ledger.place(0.5)
    table.merge(
        {
            1: IncarnationLoad(worker=worker_load(prefill_rate=4_000.0), proxies={"b": waits(3.0)}),
            2: IncarnationLoad(worker=worker_load(rest_s=0.5, free_blocks=100, oldest_age_s=8.0)),
        }
    )
    placed, policy = _placed(links, table=table)
    one, two = policy.told[0][1]["w1"], policy.told[0][1]["w2"]
    assert (one.rest_s, one.waiting_s) == (0.0, (0.0, 0.5, 3.0, 0.0, 0.0))
    assert (one.prefill_rate, one.num_waiting) == (4_000.0, 1)
    assert (two.rest_s, sum(two.waiting_s), two.prefill_rate, two.num_waiting) == (0.5, 0.0, None, 0)
    assert (one.free_tokens, two.free_tokens) == (None, 100 * 16 - 0.5 * 1_000), "what is placed is not stored yet"
    assert (one.oldest_age_s, two.oldest_age_s) == (0.0, 8.0)
    assert placed.prefill_s == pytest.approx(placed.uncached_tokens / 4_000)


def test_a_worker_that_drains_is_not_even_told_of() -> None:
    links = [idle_link("w1", incarnation=1), idle_link("w2", incarnation=2)]
    table = _table()
    table.merge({2: IncarnationLoad(worker=worker_load(is_draining=True))})
    placed, policy = _placed(links, _expected(links, Match(depths={2: 15})), table)
    assert (placed.link.worker_id, set(policy.told[0][1])) == ("w1", {"w1"})
    table.merge({1: IncarnationLoad(worker=worker_load(is_draining=True))})
    with pytest.raises(NoWorkerReady):
        _placed(links, table=table)


def test_what_a_worker_is_told_of_a_prediction_is_by_its_claims_alone() -> None:
    link = idle_link("w", incarnation=7)

    def told(match: Match | None, recent: RecentPlacements | None = None) -> int | None:
        otherwise = NOTHING if match is not None else NO_ANSWER
        return _placed([link], _expected([link], match, recent), otherwise=otherwise)[0].claimed_hit_tokens

    assert told(Match(depths={7: 3})) == 192
    assert told(Match(depths={7: 3}, pending={7: 2})) == 192
    assert told(Match()) == 0, "that it has nothing is a prediction, too"
    assert told(Match(depths={7: 3}, pending={7: 4})) is None
    assert told(None) is None, "the index did not say that it has nothing"
    assert told(None, _remembering(link, 12)) is None
    placed, _ = _placed([link])
    link.incarnation = 8
    assert placed.incarnation == 7, "that of the claims that were read"


def test_a_prefill_without_a_rate_takes_the_rate_of_the_others() -> None:
    links = [idle_link("w1", incarnation=1), idle_link("w2", incarnation=2)]
    table = _table()
    links[0].ledger.place(50.0)
    table.merge({1: IncarnationLoad(worker=worker_load(prefill_rate=4_000.0))})
    placed, _ = _placed(links, table=table)
    assert (placed.link.worker_id, placed.prefill_s) == ("w2", 0.25)


def test_a_prediction_never_covers_the_whole_prompt() -> None:
    link = idle_link("w", incarnation=1)
    placed, _ = _placed([link], _expected([link], Match(depths={1: 2})), prompt_tokens=128)
    assert placed.decision.hit_tokens == 112


def test_max_tokens_default_to_what_fits_the_worker() -> None:
    links = [idle_link("w", max_model_len=1200)]
    assert _placed(links)[0].max_tokens == 200
    assert _placed(links, max_tokens=20)[0].max_tokens == 20


def test_only_workers_that_the_request_fits_are_asked() -> None:
    links = [
        idle_link("small", incarnation=1, max_model_len=1010),
        idle_link("big", incarnation=2, max_model_len=2000),
    ]
    expected = _expected(links, Match(depths={1: 15}))
    placed, policy = _placed(links, expected, max_tokens=11)
    assert placed.link.worker_id == "big"
    assert set(policy.told[0][1]) == {"big"}
    assert _placed(links, expected, max_tokens=10)[0].link.worker_id == "small"


def test_no_worker() -> None:
    with pytest.raises(Unavailable):
        _placed([])
    check_context([], 10**9, None)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"),
    [(100, None, False), (99, None, True), (99, 1, True), (100, 1, False), (90, 10, True), (90, 11, False)],
)
def test_the_context_holds_prompt_and_answer(prompt_tokens: int, max_tokens: int | None, fits: bool) -> None:
    links = [idle_link("small", max_model_len=50), idle_link("big", max_model_len=100)]
    if fits:
        check_context(links, prompt_tokens, max_tokens)
        _placed(links, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        return
    with pytest.raises(ContextLengthExceeded) as caught:
        check_context(links, prompt_tokens, max_tokens)
    assert caught.value.code == "context_length_exceeded"
    assert "100 tokens" in str(caught.value) and str(prompt_tokens) in str(caught.value)
    with pytest.raises(ContextLengthExceeded):
        _placed(links, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
