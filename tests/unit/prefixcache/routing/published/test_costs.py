"""Policies that are one formula: the formula, on fleets where it decides."""

from __future__ import annotations

import random

import pytest

from prefixcache.routing.base import RoutingRequest, WorkerSnapshot
from prefixcache.routing.published.dynamo_cost import DynamoCost
from prefixcache.routing.published.least_ttft import LeastTtft
from prefixcache.routing.published.llmd_sticky import LlmdSticky

REQUEST = RoutingRequest(prompt_tokens=6_401)
RATE = 1_000.0


def worker(name: str, waiting_s: float = 0.0, hit: int = 0, *, running_tokens: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=name,
        rest_s=waiting_s / 4,
        waiting_s=(0.0, 0.0, 0.0, waiting_s / 2, waiting_s / 4),
        hit_tokens=hit,
        prefill_rate=RATE,
        running_tokens=running_tokens,
    )


def test_dynamo_adds_blocks_to_compute_and_blocks_to_hold() -> None:
    fleet = [worker("holder", 0.64, 6_400, running_tokens=19_200), worker("idle", running_tokens=6_400)]
    made = DynamoCost(random.Random(1)).choose(REQUEST, fleet)
    prompt = 6_401 / 64
    assert made.scores == pytest.approx({"holder": 10 + 1 / 64 + 300 + prompt, "idle": prompt + 100 + prompt})
    assert made.worker_id == "idle"
    lighter = [worker("holder", 0.64, 6_400, running_tokens=6_400), worker("idle", running_tokens=6_400)]
    assert DynamoCost(random.Random(1)).choose(REQUEST, lighter).worker_id == "holder"


def test_least_ttft_counts_all_that_waits() -> None:
    fleet = [worker("holder", 8.0, 6_400), worker("idle")]
    made = LeastTtft(random.Random(1)).choose(REQUEST, fleet)
    assert made.scores == pytest.approx({"holder": 8.001, "idle": 6.401})
    assert made.worker_id == "idle"
    assert LeastTtft(random.Random(1)).choose(REQUEST, [worker("holder", 6.0, 6_400), worker("idle")]).hit_tokens


@pytest.mark.parametrize(
    ("hit", "waiting_s", "sticks"),
    [
        (5_120, 9.9, True),
        (5_056, 9.9, False),
        (5_120, 10.1, False),
        (6_400, 10.1, False),
        (0, 0.0, False),
    ],
    ids=["four fifths", "less than that", "saturated", "saturated, though it has all", "has nothing"],
)
def test_llmd_sticks_to_four_fifths_of_the_prompt_until_ten_seconds_more_wait_there(
    hit: int, waiting_s: float, sticks: bool
) -> None:
    fleet = [worker("warm", 1.0 + waiting_s, hit), worker("calm", 1.0, 64)]
    made = LlmdSticky(random.Random(1)).choose(REQUEST, fleet)
    assert made.worker_id == ("warm" if sticks else "calm")
    assert made.scores == pytest.approx({"warm": 1_000 * (1.0 + waiting_s) + 6_401 - hit, "calm": 1_000 + 6_401 - 64})


def test_llmd_takes_the_least_loaded_of_several_warm_ones() -> None:
    fleet = [worker("all", 4.0, 6_400), worker("most", 2.0, 5_760), worker("idle")]
    assert LlmdSticky(random.Random(1)).choose(REQUEST, fleet).worker_id == "most"


def test_llmd_sticks_to_nobody_for_a_prompt_shorter_than_a_block() -> None:
    fleet = [worker("warm", 5.0), worker("calm")]
    assert LlmdSticky(random.Random(1)).choose(RoutingRequest(prompt_tokens=60), fleet).worker_id == "calm"
