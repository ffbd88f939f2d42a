from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.routing.base import RoutingRequest, WorkerSnapshot
from prefixcache.routing.longest_prefix import LongestPrefix

REQUEST = RoutingRequest(prompt_tokens=1_000)


def worker(name: str, hit: int = 0, waiting: int = 0, running: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id=name, hit_tokens=hit, num_waiting=waiting, num_running=running)


small = st.integers(0, 3)
fleets = st.lists(st.tuples(small, small, small), min_size=1, max_size=8).map(
    lambda rows: [worker(f"w{n}", hit * 64, waiting, running) for n, (hit, waiting, running) in enumerate(rows)]
)


def test_one_longest_match_wins_whatever_its_load() -> None:
    busy = WorkerSnapshot(worker_id="b", hit_tokens=128, rest_s=99.0, num_waiting=99, num_running=99)
    decision = LongestPrefix(random.Random(1)).choose(REQUEST, [worker("a", 64), busy])
    assert (decision.worker_id, decision.reason, decision.hit_tokens) == ("b", "longest_prefix", 128)
    assert decision.scores == {"a": 64.0, "b": 128.0}


def test_a_shared_longest_match_goes_to_the_fewest_requests() -> None:
    policy = LongestPrefix(random.Random(1))
    fleet = [worker("a", 64, 2, 8), worker("b", 64, 1, 9), worker("c", 64, 4, 4), worker("d", 0, 0, 0)]
    decision = policy.choose(REQUEST, fleet)
    assert (decision.worker_id, decision.reason) == ("c", "longest_prefix")


def test_without_a_match_the_fewest_requests_win() -> None:
    decision = LongestPrefix(random.Random(1)).choose(REQUEST, [worker("a", 0, 1), worker("b", 0, 2, 5)])
    assert (decision.worker_id, decision.reason, decision.hit_tokens) == ("a", "no_prefix", 0)


def test_no_worker_is_an_error() -> None:
    with pytest.raises(ValueError, match="no worker"):
        LongestPrefix(random.Random(1)).choose(REQUEST, [])


@given(fleets, st.integers())
def test_choice_is_never_worse_than_another_worker(fleet: list[WorkerSnapshot], seed: int) -> None:
    decision = LongestPrefix(random.Random(seed)).choose(REQUEST, fleet)
    chosen = next(snapshot for snapshot in fleet if snapshot.worker_id == decision.worker_id)
    assert decision.hit_tokens == chosen.hit_tokens
    for other in fleet:
        assert (-chosen.hit_tokens, chosen.num_requests) <= (-other.hit_tokens, other.num_requests)


@given(fleets)
def test_every_candidate_has_a_score_and_the_chosen_one_the_best(fleet: list[WorkerSnapshot]) -> None:
    decision = LongestPrefix(random.Random(1)).choose(REQUEST, fleet)
    assert set(decision.scores) == {snapshot.worker_id for snapshot in fleet}
    assert decision.scores[decision.worker_id] == max(decision.scores.values())


@given(fleets, st.integers())
def test_same_random_source_same_choice(fleet: list[WorkerSnapshot], seed: int) -> None:
    first, second = (LongestPrefix(random.Random(seed)).choose(REQUEST, fleet) for _ in range(2))
    assert first == second


def test_equal_workers_share_the_requests() -> None:
    policy = LongestPrefix(random.Random(1))
    fleet = [worker("a", 64), worker("b", 64), worker("c", 64), worker("busy", 64, 1)]
    counts = Counter(policy.choose(REQUEST, fleet).worker_id for _ in range(3_000))
    assert set(counts) == {"a", "b", "c"}
    assert min(counts.values()) > 800  # 1,000 expected, deviation 26
