"""What policies are told, and what they have in common."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import pytest

from prefixcache.routing.base import (
    HitSource,
    Reason,
    RoutingRequest,
    WorkerSnapshot,
    candidates,
    decision,
    least_of,
    reason_for,
)

WAITING_S = (1.0, 2.0, 4.0, 8.0, 16.0)


@pytest.mark.parametrize(
    ("prefill_s", "ahead_s"),
    [(0.0, 1.5), (0.25, 1.5), (0.26, 3.5), (1.0, 3.5), (4.0, 7.5), (16.0, 15.5), (16.1, 31.5), (1e9, 31.5)],
)
def test_ahead_are_the_slice_that_runs_and_what_waits_up_to_the_own_class(prefill_s: float, ahead_s: float) -> None:
    worker = WorkerSnapshot(worker_id="w", rest_s=0.5, waiting_s=WAITING_S)
    assert worker.ahead_s(prefill_s) == ahead_s
    assert worker.all_ahead_s == 31.5


def test_nothing_is_ahead_of_a_worker_that_is_told_nothing_of() -> None:
    worker = WorkerSnapshot(worker_id="w")
    assert (worker.ahead_s(1e9), worker.all_ahead_s, worker.num_requests, worker.free_tokens) == (0.0, 0.0, 0, None)


def test_times_below_zero_are_no_head_start() -> None:
    worker = WorkerSnapshot(worker_id="w", rest_s=-100.0, waiting_s=WAITING_S)
    assert (worker.ahead_s(1.0), worker.all_ahead_s) == (0.0, 0.0)


def test_uncached_tokens_are_the_rest_of_the_prompt() -> None:
    assert WorkerSnapshot(worker_id="w", hit_tokens=64).uncached_tokens(RoutingRequest(prompt_tokens=100)) == 36


def test_candidates_are_those_that_stay_or_all() -> None:
    stays, leaves = WorkerSnapshot(worker_id="stays"), WorkerSnapshot(worker_id="leaves", is_draining=True)
    assert list(candidates([leaves, stays])) == [stays]
    assert list(candidates([leaves])) == [leaves]
    with pytest.raises(ValueError, match="no worker"):
        candidates([])


def test_the_least_is_shared_by_those_that_differ_by_rounding() -> None:
    fleet = [WorkerSnapshot(worker_id=name) for name in "abc"]
    scores = {"a": 1.0, "b": 1.0 + 1e-12, "c": 1.001}
    source = random.Random(1)
    assert set(Counter(least_of(fleet, scores, source).worker_id for _ in range(100))) == {"a", "b"}


def test_a_decision_names_the_chosen_one_and_all_scores() -> None:
    fleet = [WorkerSnapshot(worker_id="a", hit_tokens=64), WorkerSnapshot(worker_id="b", hit_tokens=128)]
    made = decision(fleet[0], fleet, {"a": 1.0, "b": 2.0})
    assert (made.worker_id, made.hit_tokens, made.reason, made.scores) == ("a", 64, "least_ahead", {"a": 1.0, "b": 2.0})


def _hits(*hits: tuple[int, HitSource]) -> Sequence[WorkerSnapshot]:
    return [
        WorkerSnapshot(worker_id=f"w{n}", hit_tokens=tokens, hit_source=source)
        for n, (tokens, source) in enumerate(hits)
    ]


@pytest.mark.parametrize(
    ("hits", "reason"),
    [
        (_hits((0, "claims"), (0, "claims")), "no_prefix"),
        (_hits((128, "claims"), (64, "pending")), "longest_prefix"),
        (_hits((128, "pending"), (64, "claims")), "pending_prefix"),
        (_hits((128, "own_placements"), (64, "claims")), "own_placements"),
        (_hits((64, "pending"), (128, "claims")), "least_ahead"),
        (_hits((0, "claims"), (64, "own_placements")), "least_ahead"),
    ],
)
def test_the_reason_of_choosing_the_first(hits: Sequence[WorkerSnapshot], reason: Reason) -> None:
    assert reason_for(hits[0], hits) == reason
    assert reason in get_args(Reason)
