"""What holds for every policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

import pytest

from prefixcache.routing.base import HitSource, Reason, RoutingRequest, WorkerSnapshot, reason_for
from prefixcache.routing.policies import DEFAULT_POLICY, POLICIES
from prefixcache.routing.rates import prefill_rates

REQUEST = RoutingRequest(prompt_tokens=1_000)


def test_policies_stand_under_their_own_names() -> None:
    assert DEFAULT_POLICY == "eta"
    assert set(POLICIES) == {"eta", "longest_prefix", "round_robin"}
    for name, build in POLICIES.items():
        assert build(random.Random(1)).name == name


@pytest.mark.parametrize("name", POLICIES)
def test_a_draining_worker_gets_a_request_only_where_nobody_else_is(name: str) -> None:
    policy = POLICIES[name](random.Random(1))
    draining = WorkerSnapshot(worker_id="draining", hit_tokens=960, is_draining=True)
    other = WorkerSnapshot(worker_id="other", ahead_s=100.0, num_waiting=50)
    decision = policy.choose(REQUEST, [draining, other])
    assert (decision.worker_id, decision.reason) == ("other", "no_prefix")
    assert set(decision.scores) == {"draining", "other"}
    decision = policy.choose(REQUEST, [draining])
    assert (decision.worker_id, decision.reason) == ("draining", "longest_prefix")


@pytest.mark.parametrize("name", POLICIES)
def test_no_worker_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="no worker"):
        POLICIES[name](random.Random(1)).choose(REQUEST, [])


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


def _rated(*rates: float | None) -> Sequence[WorkerSnapshot]:
    return [WorkerSnapshot(worker_id=f"w{n}", prefill_rate=rate) for n, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("known", "rates"),
    [
        ((None, None), [1_000.0, 1_000.0]),
        ((500.0, None, 1_500.0), [500.0, 1_000.0, 1_500.0]),
        ((8_000.0, None), [8_000.0, 8_000.0]),
    ],
)
def test_an_unknown_rate_is_the_mean_of_the_known(known: tuple[float | None, ...], rates: list[float]) -> None:
    assert list(prefill_rates(_rated(*known)).values()) == rates
