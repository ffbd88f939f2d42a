from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.routing.base import RoutingRequest, WorkerSnapshot
from prefixcache.routing.eta import Eta

REQUEST = RoutingRequest(prompt_tokens=2_000)
RATE = 1_000.0


def worker(name: str, ahead_s: float = 0.0, hit: int = 0, **fields: Any) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id=name, ahead_s=ahead_s, hit_tokens=hit, **{"prefill_rate": RATE, **fields})


def chosen(*fleet: WorkerSnapshot, seed: int = 1, request: RoutingRequest = REQUEST) -> str:
    return Eta(random.Random(seed)).choose(request, fleet).worker_id


def test_the_score_is_what_is_ahead_and_what_is_to_compute_in_seconds() -> None:
    fleet = [worker("a", 0.5, 1_600), worker("b", 0.25, 0, prefill_rate=4_000.0), worker("c", 3.0, 1_984)]
    decision = Eta(random.Random(1)).choose(REQUEST, fleet)
    assert decision.scores == pytest.approx({"a": 0.9, "b": 0.75, "c": 3.016})
    assert (decision.worker_id, decision.hit_tokens, decision.reason) == ("b", 0, "least_ahead")


def test_a_prefix_is_worth_a_wait_shorter_than_its_prefill() -> None:
    assert chosen(worker("holder", 1.9, 1_984), worker("idle")) == "holder"
    assert chosen(worker("holder", 2.3, 1_984), worker("idle")) == "idle"


@pytest.mark.parametrize(
    ("least_s", "other_s", "near"),
    [(1.0, 1.099, True), (1.0, 1.101, False), (0.02, 0.0299, True), (0.02, 0.0301, False), (0.0, 0.01, True)],
)
def test_near_ties_are_within_a_tenth_or_ten_milliseconds(least_s: float, other_s: float, near: bool) -> None:
    request = RoutingRequest(prompt_tokens=0)
    fleet = [worker("least", least_s, num_running=1), worker("other", other_s)]
    assert chosen(*fleet, request=request) == ("other" if near else "least")


def test_near_ties_go_to_the_fewest_tokens_to_compute_then_to_the_fewest_requests() -> None:
    holder = worker("holder", 0.06, 1_936, num_waiting=3)
    assert chosen(holder, worker("idle", prefill_rate=16_000.0)) == "holder", "0.124 against 0.125 s"
    assert chosen(worker("a", num_waiting=1), worker("b", num_running=2), worker("c", num_running=1), seed=3) != "b"
    rates = [worker("a", prefill_rate=1_000.0), worker("b", prefill_rate=1_001.0)]
    assert {chosen(*rates, seed=seed) for seed in range(20)} == {"a", "b"}, "noise of the rates decides nothing"


def test_equals_share_the_requests() -> None:
    policy = Eta(random.Random(1))
    fleet = [worker("a"), worker("b"), worker("c"), worker("busy", num_running=1)]
    counts = Counter(policy.choose(REQUEST, fleet).worker_id for _ in range(3_000))
    assert set(counts) == {"a", "b", "c"}
    assert min(counts.values()) > 800  # 1,000 expected, deviation 26


def test_a_burst_of_equal_prompts_meets_where_the_first_is_until_the_wait_outweighs_the_prefill() -> None:
    """Nothing has started: each next one finds the pending claims and the ledgers of those before."""
    uncached, num_workers = 16, 4
    ahead = [0.0] * num_workers
    pending = [0] * num_workers
    order: list[int] = []
    policy = Eta(random.Random(5))
    for _ in range(13):
        fleet = [worker(f"{n}", ahead[n], pending[n], hit_source="pending") for n in range(num_workers)]
        place = int(policy.choose(REQUEST, fleet).worker_id)
        ahead[place] += (REQUEST.prompt_tokens - pending[place]) / RATE
        pending[place] = REQUEST.prompt_tokens - uncached
        order.append(place)
    # The first brings 2 s, each other one 0.016 s; an idle worker would take 2 s, and up to 2.2 s is a near tie.
    num_met = next(count for count in range(100) if 2.0 + (count + 1) * 0.016 > 2.2)
    assert num_met == 12
    assert len(set(order[: 1 + num_met])) == 1
    fleet = [worker(f"{n}", ahead[n], pending[n], hit_source="pending") for n in range(num_workers)]
    decision = policy.choose(REQUEST, fleet)
    assert int(decision.worker_id) != order[0]
    assert decision.reason == "least_ahead"


def test_a_burst_stays_together_while_the_first_prefill_runs() -> None:
    """Half of the prefill is done: what joins may wait for a second and more."""
    fleet = [worker("first", 1.0 + 60 * 0.016, 1_984, hit_source="pending"), worker("idle")]
    decision = Eta(random.Random(1)).choose(REQUEST, fleet)
    assert (decision.worker_id, decision.reason) == ("first", "pending_prefix")


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 31), st.sampled_from([None, 500.0, 1_000.0, 20_000.0])),
        min_size=1,
        max_size=8,
    ),
    st.integers(),
)
def test_nobody_is_better_by_more_than_a_near_tie(rows: list[tuple[float, int, float | None]], seed: int) -> None:
    fleet = [worker(f"w{n}", ahead, hit * 64, prefill_rate=rate) for n, (ahead, hit, rate) in enumerate(rows)]
    decision = Eta(random.Random(seed)).choose(REQUEST, fleet)
    least = min(decision.scores.values())
    assert decision.scores[decision.worker_id] <= least + max(0.1 * least, 0.01)
    assert set(decision.scores) == {snapshot.worker_id for snapshot in fleet}
    assert decision == Eta(random.Random(seed)).choose(REQUEST, fleet)


def cache(name: str, held: float, capacity: float | None = 10_000.0, **fields: Any) -> WorkerSnapshot:
    return worker(name, held_tokens=held, capacity_tokens=capacity, **fields)


def scores(*fleet: WorkerSnapshot) -> dict[str, float]:
    return dict(Eta(random.Random(1)).choose(REQUEST, fleet).scores)


def test_what_must_be_evicted_for_the_prompt_has_its_price() -> None:
    fleet = [cache("full", 10_000.0), cache("nearly", 10_000.0 - 500, hit=1_000)]
    crowding_s = (10_000.0 - 9_750) / RATE
    assert scores(*fleet) == pytest.approx({"full": 2.0 + 2 * 2.0 + crowding_s, "nearly": 1.0 + 2 * 0.5})


def test_a_cache_that_holds_more_than_its_share_is_given_less() -> None:
    holder, others = cache("holder", 5_000.0, hit=1_984), [cache("a", 1_000.0), cache("b", 1_000.0)]
    assert scores(holder, *others) == pytest.approx({"holder": 0.016 + (5_000 - 7_000 / 3) / RATE, "a": 2.0, "b": 2.0})
    assert chosen(holder, *others) in ("a", "b"), "its prefix is worth less than the chats that it will push out"
    assert chosen(cache("holder", 2_000.0, hit=1_984), *others) == "holder"


def test_shares_are_by_capacity() -> None:
    fleet = [cache("large", 6_000.0, 30_000.0), cache("small", 2_000.0, 10_000.0)]
    assert scores(*fleet) == pytest.approx({"large": 2.0, "small": 2.0})


def test_crowding_counts_less_where_there_is_room_enough() -> None:
    fleet = [cache("holder", 1_000.0, 20_000.0, hit=1_984), cache("empty", 0.0, 20_000.0)]
    assert scores(*fleet) == pytest.approx({"holder": 0.016 + 0.2 * 0.5, "empty": 2.0})


def test_memory_has_no_price_where_a_capacity_is_not_known() -> None:
    fleet = [cache("known", 10_000.0), cache("unknown", 0.0, None)]
    assert scores(*fleet) == pytest.approx({"known": 2.0, "unknown": 2.0})
