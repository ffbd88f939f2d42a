"""The contract of every policy, published ones included: one suite for all of them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest

from prefixcache.load import NUM_WAITING_CLASSES
from prefixcache.routing.base import Decision, Policy, Reason, RoutingRequest, WorkerSnapshot, reason_for
from prefixcache.routing.policies import DEFAULT_POLICY, POLICIES, PUBLISHED_POLICIES
from tests.support.fleets import some_fleet, some_request
from tests.support.seeds import seeded

ALL = {**POLICIES, **PUBLISHED_POLICIES}
REQUEST = RoutingRequest(prompt_tokens=1_000, index_hashes=range(1, 16))
NUM_RANDOM = 300

every_policy = pytest.mark.parametrize("build", ALL.values(), ids=ALL)
Build = Callable[[random.Random], Policy]


def test_policies_stand_under_their_own_names() -> None:
    assert DEFAULT_POLICY == "eta"
    assert set(POLICIES) == {"eta", "longest_prefix", "least_loaded", "round_robin", "consistent_hash"}
    assert set(PUBLISHED_POLICIES) == {"sglang_tree", "dynamo_cost", "llmd_sticky", "least_ttft"}
    for name, build in ALL.items():
        assert build(random.Random(1)).name == name


def check(made: Decision, workers: Sequence[WorkerSnapshot]) -> None:
    """What any decision of any policy is."""
    by_id = {worker.worker_id: worker for worker in workers}
    chosen = by_id[made.worker_id]
    staying = [worker for worker in workers if not worker.is_draining] or workers
    assert chosen in staying
    assert made.hit_tokens == chosen.hit_tokens
    assert made.reason in get_args(Reason) and made.reason == reason_for(chosen, staying)
    assert set(made.scores) == set(by_id), "a score of every worker, draining ones included"
    assert all(map(math.isfinite, made.scores.values()))


@every_policy
def test_no_worker_is_an_error(build: Build) -> None:
    with pytest.raises(ValueError, match="no worker"):
        build(random.Random(1)).choose(REQUEST, [])


@every_policy
def test_any_fleet_gets_a_decision_and_the_same_source_the_same_one(build: Build) -> None:
    source = seeded("any fleet")
    seed = source.random()
    policy, again = build(random.Random(seed)), build(random.Random(seed))
    for _ in range(NUM_RANDOM):
        request = some_request(source, num_blocks=source.randint(0, 40))
        fleet = some_fleet(source, source.randint(1, 12), most_blocks=len(request.index_hashes))
        made = policy.choose(request, fleet)
        check(made, fleet)
        assert again.choose(request, fleet) == made


@every_policy
@pytest.mark.parametrize(
    "fields",
    [
        {"is_draining": True},
        {"num_waiting": 10_000, "num_running": 10_000, "waiting_s": (1e6,) * NUM_WAITING_CLASSES, "rest_s": 1e6},
        {"free_tokens": 0.0, "held_tokens": 1e9, "capacity_tokens": 1e6},
    ],
    ids=["draining", "overloaded", "full"],
)
def test_one_worker_gets_everything(build: Build, fields: dict[str, Any]) -> None:
    only = WorkerSnapshot(worker_id="only", **fields)
    made = build(random.Random(1)).choose(REQUEST, [only])
    check(made, [only])


@every_policy
def test_where_all_are_overloaded_one_is_chosen_all_the_same(build: Build) -> None:
    """Whether a request is refused is nothing that a policy decides."""
    source = seeded("overloaded")
    policy = build(source)
    for _ in range(NUM_RANDOM):
        fleet = some_fleet(
            source,
            source.randint(1, 8),
            most_blocks=15,
            rest_s=100.0,
            waiting_s=tuple(source.uniform(1e3, 1e4) for _ in range(NUM_WAITING_CLASSES)),
            num_waiting=1_000,
            free_tokens=0.0,
        )
        check(policy.choose(REQUEST, fleet), fleet)


@every_policy
def test_a_draining_worker_gets_a_request_only_where_nobody_else_is(build: Build) -> None:
    policy = build(random.Random(1))
    draining = WorkerSnapshot(worker_id="draining", hit_tokens=960, is_draining=True)
    other = WorkerSnapshot(worker_id="other", rest_s=100.0, num_waiting=50)
    made = policy.choose(REQUEST, [draining, other])
    assert (made.worker_id, made.reason) == ("other", "no_prefix")
    check(made, [draining, other])
    made = policy.choose(REQUEST, [draining])
    assert (made.worker_id, made.reason) == ("draining", "longest_prefix")


@every_policy
def test_stale_snapshots_and_clocks_that_jump_do_no_harm(build: Build) -> None:
    """Ages and times of a clock that was set, in either direction, and numbers as large as a record may hold."""
    source = seeded("clock jumps")
    times = (-1e12, -3_600.0, -1e-9, 0.0, 1e-12, 3_600.0, 1e12)
    policy = build(source)
    for _ in range(NUM_RANDOM):
        fleet = [
            WorkerSnapshot(
                worker_id=f"w{number}",
                hit_tokens=64 * source.randint(0, 15),
                rest_s=source.choice(times),
                waiting_s=tuple(source.choice(times) for _ in range(NUM_WAITING_CLASSES)),
                prefill_rate=source.choice([None, 0.01, 1e12]),
                num_waiting=source.choice([0, 10**9]),
                free_tokens=source.choice([None, -1e12, 0.0, 1e12]),
                oldest_age_s=source.choice(times),
                held_tokens=source.choice([0.0, 1e12]),
                capacity_tokens=source.choice([None, 0.0, 1.0, 1e12]),
            )
            for number in range(source.randint(1, 6))
        ]
        check(policy.choose(REQUEST, fleet), fleet)


@every_policy
def test_equal_workers_share_prompts_that_nobody_has(build: Build) -> None:
    source = seeded("equal workers")
    policy = build(source)
    fleet = [WorkerSnapshot(worker_id=f"w{number}") for number in range(8)]
    counts = Counter(policy.choose(some_request(source), fleet).worker_id for _ in range(1_600))
    assert set(counts) == {worker.worker_id for worker in fleet}
    # 200 expected, deviation 13
    assert 120 < min(counts.values()) and max(counts.values()) < 280


@every_policy
def test_the_order_of_the_workers_does_not_count(build: Build) -> None:
    """Not even in the long run: of two fleets that differ by order alone each worker gets as much."""
    source = seeded("order")
    fleet = [WorkerSnapshot(worker_id=f"w{number}", num_running=number // 3) for number in range(6)]
    counts: list[Counter[str]] = []
    for workers in (fleet, fleet[::-1]):
        policy = build(source)
        counts.append(Counter(policy.choose(some_request(source), workers).worker_id for _ in range(1_200)))
    # Three of them, or all six, share: deviation of a difference at most 23.
    for worker in fleet:
        assert abs(counts[0][worker.worker_id] - counts[1][worker.worker_id]) < 130, counts


@every_policy
def test_workers_come_and_go_and_a_new_one_is_used_at_once(build: Build) -> None:
    source = seeded("come and go")
    policy = build(source)
    names = [f"w{number}" for number in range(8)]
    for _ in range(NUM_RANDOM):
        present = source.sample(names, source.randint(1, len(names)))
        request = some_request(source, num_blocks=10)
        fleet = [WorkerSnapshot(worker_id=name, num_waiting=source.randrange(3)) for name in present]
        check(policy.choose(request, fleet), fleet)
    busy = [WorkerSnapshot(worker_id=name, rest_s=1.0, num_waiting=3, running_tokens=10_000) for name in names]
    fleet = [*busy, WorkerSnapshot(worker_id="new")]
    counts = Counter(policy.choose(some_request(source), fleet).worker_id for _ in range(100))
    # By chance alone a ninth of them.
    assert counts["new"] > 0
