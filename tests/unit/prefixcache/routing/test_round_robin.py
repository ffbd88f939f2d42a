"""Everybody in turn."""

from __future__ import annotations

import random

from prefixcache.routing.base import RoutingRequest, WorkerSnapshot
from prefixcache.routing.round_robin import RoundRobin

REQUEST = RoutingRequest(prompt_tokens=1_000)


def _chosen(policy: RoundRobin, *names: str) -> str:
    return policy.choose(REQUEST, [WorkerSnapshot(worker_id=name) for name in names]).worker_id


def test_every_worker_has_its_turn_whatever_order_they_come_in() -> None:
    policy = RoundRobin(random.Random(1))
    orders = (("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c"), ("a", "c", "b"))
    assert [_chosen(policy, *order) for order in orders] == ["a", "b", "c", "a"]


def test_load_and_prefixes_do_not_count() -> None:
    policy = RoundRobin(random.Random(1))
    workers = [
        WorkerSnapshot(worker_id="a", rest_s=60.0, num_waiting=9),
        WorkerSnapshot(worker_id="b", hit_tokens=960),
    ]
    decisions = [policy.choose(REQUEST, workers) for _ in range(2)]
    assert [decision.worker_id for decision in decisions] == ["a", "b"]
    assert [decision.hit_tokens for decision in decisions] == [0, 960]


def test_workers_may_come_and_go() -> None:
    policy = RoundRobin(random.Random(1))
    assert _chosen(policy, "a", "b", "c") == "a"
    assert _chosen(policy, "a", "c") == "c"
    assert _chosen(policy, "a", "b", "c") == "a"
    assert _chosen(policy, "d", "e") == "d"
