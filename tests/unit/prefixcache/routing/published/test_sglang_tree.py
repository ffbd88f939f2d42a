"""The approximate tree: what it takes workers to have, and when it does not ask."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from prefixcache.routing.base import RoutingRequest, WorkerSnapshot
from prefixcache.routing.published.sglang_tree import MOST_TREE_TOKENS, SglangTree
from tests.support.fleets import some_request
from tests.support.seeds import seeded


def asked(hashes: Sequence[int], block_tokens: float = 64) -> RoutingRequest:
    return RoutingRequest(prompt_tokens=10_000, index_hashes=hashes, block_tokens=block_tokens)


def fleet(*names: str, num_running: int = 0) -> list[WorkerSnapshot]:
    return [WorkerSnapshot(worker_id=name, num_running=num_running) for name in names]


def test_a_prompt_goes_where_more_than_a_third_of_it_was_sent_whatever_the_engine_says() -> None:
    policy = SglangTree(random.Random(1))
    workers = [*fleet("a", "b", "c"), WorkerSnapshot(worker_id="holder", hit_tokens=640)]
    home = policy.choose(asked(range(10)), workers).worker_id
    for _ in range(20):
        made = policy.choose(asked([*range(10), *range(100, 110)]), workers)
        assert made.worker_id == home
    assert made.scores[home] == 1.0
    assert set(made.scores) == {"a", "b", "c", "holder"}


def test_a_match_of_no_more_than_the_threshold_goes_to_the_smallest_tree() -> None:
    policy = SglangTree(random.Random(1))
    workers = fleet("a", "b")
    home = policy.choose(asked(range(10)), workers).worker_id
    [other] = {"a", "b"} - {home}
    made = policy.choose(asked([*range(3), *range(20, 27)]), workers)
    assert (made.worker_id, made.scores[home]) == (other, 0.3)
    made = policy.choose(asked([*range(4), *range(30, 36)]), workers)
    assert (made.worker_id, made.scores[home], made.scores[other]) == (home, 0.4, 0.3)


@pytest.mark.parametrize(
    ("most", "least", "is_balanced"),
    [(65, 0, False), (64, 0, True), (165, 100, False), (200, 136, True), (150, 99, True)],
)
def test_a_fleet_out_of_balance_goes_by_the_fewest_requests(most: int, least: int, is_balanced: bool) -> None:
    """By more than 64 and more than half as many again."""
    policy = SglangTree(random.Random(1))
    request = asked(range(10))
    busy, calm = WorkerSnapshot(worker_id="busy"), WorkerSnapshot(worker_id="calm", is_draining=True)
    assert policy.choose(request, [busy, calm]).worker_id == "busy"
    workers = [
        WorkerSnapshot(worker_id="busy", num_waiting=most - 10, num_running=10),
        WorkerSnapshot(worker_id="calm", num_running=least),
    ]
    assert policy.choose(request, workers).worker_id == ("busy" if is_balanced else "calm")


def test_what_was_sent_out_of_balance_is_remembered_too() -> None:
    policy = SglangTree(random.Random(1))
    policy.choose(asked(range(10)), [*fleet("a", num_running=100), *fleet("b")])
    made = policy.choose(asked(range(10)), fleet("a", "b"))
    assert (made.worker_id, made.scores) == ("b", {"a": 0.0, "b": 1.0})


def test_equal_matches_share() -> None:
    policy = SglangTree(random.Random(1))
    for name in "ab":
        policy.choose(asked(range(10)), [*fleet(name), *fleet(*({"a", "b"} - {name}), num_running=100)])
    counts = Counter(policy.choose(asked(range(10)), fleet("a", "b")).worker_id for _ in range(200))
    assert min(counts.values()) > 60  # 100 expected, deviation 7


def test_a_worker_that_left_has_nothing_when_it_comes_back_and_the_others_have_all() -> None:
    policy = SglangTree(random.Random(1))
    policy.choose(asked(range(10)), [*fleet("a"), *fleet("b", num_running=100)])
    policy.choose(asked(range(20, 30)), [*fleet("b"), *fleet("a", num_running=100)])
    policy.choose(asked([]), fleet("a"))
    made = policy.choose(asked([*range(10), *range(20, 30)]), fleet("a", "b"))
    assert made.scores == {"a": 0.5, "b": 0.0}


def test_a_tree_is_bounded_and_forgets_the_deepest_of_the_longest_unused_first() -> None:
    """Against the dumb truth: prompts of one worker, and the blocks of the latest of them that fit."""
    source = seeded("tree")
    block_tokens = MOST_TREE_TOKENS / 50
    policy = SglangTree(source)
    prompts = [list(some_request(source, num_blocks=source.randint(1, 12)).index_hashes) for _ in range(12)]
    uses: list[int] = []
    for _ in range(300):
        uses.append(source.randrange(len(prompts)))
        policy.choose(asked(prompts[uses[-1]], block_tokens), fleet("only"))
        kept: dict[int, None] = {}
        for number in reversed(uses):
            for block in prompts[number]:
                if len(kept) < 50:
                    kept.setdefault(block)
        probe = source.randrange(len(prompts))
        uses.append(probe)
        made = policy.choose(asked(prompts[probe], block_tokens), fleet("only"))
        assert made.scores["only"] == sum(block in kept for block in prompts[probe]) / len(prompts[probe])


def test_one_prompt_larger_than_the_tree() -> None:
    policy = SglangTree(random.Random(1))
    request = asked(range(10), MOST_TREE_TOKENS / 4)
    policy.choose(request, fleet("only"))
    assert policy.choose(request, fleet("only")).scores == {"only": 0.4}
