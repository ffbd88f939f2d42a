"""Fewest requests first."""

from __future__ import annotations

import random
from collections import Counter

from prefixcache.routing.base import RoutingRequest, WorkerSnapshot
from prefixcache.routing.least_loaded import LeastLoaded

REQUEST = RoutingRequest(prompt_tokens=1_000)


def test_the_fewest_requests_win_whatever_they_have_of_the_prompt() -> None:
    holder = WorkerSnapshot(worker_id="holder", hit_tokens=960, num_waiting=1, num_running=2)
    other = WorkerSnapshot(worker_id="other", num_running=2, rest_s=60.0)
    made = LeastLoaded(random.Random(1)).choose(REQUEST, [holder, other])
    assert (made.worker_id, made.reason, made.scores) == ("other", "least_ahead", {"holder": 3.0, "other": 2.0})


def test_as_many_requests_go_by_the_prefill_ahead_and_then_by_chance() -> None:
    policy = LeastLoaded(random.Random(1))
    fleet = [
        WorkerSnapshot(worker_id="later", num_running=2, waiting_s=(0.0, 0.0, 0.0, 0.0, 20.0)),
        WorkerSnapshot(worker_id="a", num_running=2, rest_s=1.0),
        WorkerSnapshot(worker_id="b", num_waiting=2, waiting_s=(1.0, 0.0, 0.0, 0.0, 0.0)),
        WorkerSnapshot(worker_id="more", num_running=3),
    ]
    counts = Counter(policy.choose(REQUEST, fleet).worker_id for _ in range(400))
    assert set(counts) == {"a", "b"} and min(counts.values()) > 140  # 200 expected, deviation 10
