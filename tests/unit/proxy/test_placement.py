"""What the policy is told, and which workers a request fits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest

from prefixcache.errors import ContextLengthExceeded, Unavailable
from prefixcache.routing.base import Decision, RoutingRequest, WorkerSnapshot
from prefixcache.routing.longest_prefix import LongestPrefix
from prefixcache.types import CacheGeometry
from proxy.placement import Placement, check_context, place
from proxy.tokenizer_fetch import Tokenizers
from proxy.warnings_log import QuietLog
from proxy.worker_link import WorkerLink
from tests.support.worker_records import worker_record

GEOMETRY = CacheGeometry()


def _link(worker_id: str, *, incarnation: int = 1, max_model_len: int = 4096) -> WorkerLink:
    record = worker_record(worker_id=worker_id, incarnation=incarnation, max_model_len=max_model_len)
    # A link that is not run fetches and logs nothing.
    return WorkerLink(record, cast(Tokenizers, None), cast(QuietLog, None))


class RecordingPolicy(LongestPrefix):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.told: list[tuple[RoutingRequest, list[WorkerSnapshot]]] = []

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        self.told.append((request, list(workers)))
        return super().choose(request, workers)


def _placed(links: Sequence[WorkerLink], depths: dict[int, int], **fields: Any) -> tuple[Placement, RecordingPolicy]:
    policy = RecordingPolicy()
    arguments = {"prompt_tokens": 1000, "max_tokens": None, **fields}
    return place(policy, links, depths, geometry=GEOMETRY, **arguments), policy


def test_a_match_belongs_to_the_incarnation_not_to_the_worker() -> None:
    links = [_link("old", incarnation=7), _link("new", incarnation=8)]
    placement, policy = _placed(links, {8: 3, 6: 15})
    assert placement.link is links[1]
    assert placement.decision.hit_tokens == 192
    ((request, told),) = policy.told
    assert request.prompt_tokens == 1000
    assert {snapshot.worker_id: snapshot.hit_tokens for snapshot in told} == {"old": 0, "new": 192}


def test_a_prediction_never_covers_the_whole_prompt() -> None:
    placement, _ = _placed([_link("w")], {1: 2}, prompt_tokens=128)
    assert placement.decision.hit_tokens == 112


def test_max_tokens_default_to_what_fits_the_worker() -> None:
    assert _placed([_link("w", max_model_len=1200)], {})[0].max_tokens == 200
    assert _placed([_link("w", max_model_len=1200)], {}, max_tokens=20)[0].max_tokens == 20


def test_only_workers_that_the_request_fits_are_asked() -> None:
    links = [_link("small", incarnation=1, max_model_len=1010), _link("big", incarnation=2, max_model_len=2000)]
    placement, policy = _placed(links, {1: 15}, max_tokens=11)
    assert placement.link.worker_id == "big"
    assert [snapshot.worker_id for snapshot in policy.told[0][1]] == ["big"]
    assert _placed(links, {1: 15}, max_tokens=10)[0].link.worker_id == "small"


def test_no_worker() -> None:
    with pytest.raises(Unavailable):
        _placed([], {})
    check_context([], 10**9, None)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"),
    [(100, None, False), (99, None, True), (99, 1, True), (100, 1, False), (90, 10, True), (90, 11, False)],
)
def test_the_context_holds_prompt_and_answer(prompt_tokens: int, max_tokens: int | None, fits: bool) -> None:
    links = [_link("small", max_model_len=50), _link("big", max_model_len=100)]
    if fits:
        check_context(links, prompt_tokens, max_tokens)
        _placed(links, {}, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        return
    with pytest.raises(ContextLengthExceeded) as caught:
        check_context(links, prompt_tokens, max_tokens)
    assert caught.value.code == "context_length_exceeded"
    assert "100 tokens" in str(caught.value) and str(prompt_tokens) in str(caught.value)
    with pytest.raises(ContextLengthExceeded):
        _placed(links, {}, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
