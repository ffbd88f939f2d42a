"""The same worker for the same beginning, unless it has too much to do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from prefixcache.routing.base import RoutingRequest, WorkerSnapshot
from prefixcache.routing.consistent_hash import ConsistentHash
from tests.support.fleets import some_request
from tests.support.seeds import seeded

KEY_BLOCKS = 64
"""4,096 tokens in blocks of 64."""

KEYS = (1, 0x1234567890ABCDEF, 0x9E3779B97F4A7C15, 2**64 - 1)


def fleet(num_workers: int, *, num_running: int = 0) -> list[WorkerSnapshot]:
    return [WorkerSnapshot(worker_id=f"worker-{number}", num_running=num_running) for number in range(num_workers)]


def chosen(request: RoutingRequest, workers: Sequence[WorkerSnapshot], seed: int = 1) -> str:
    return ConsistentHash(random.Random(seed)).choose(request, workers).worker_id


def test_all_proxies_choose_the_same_worker_in_whatever_order_they_know_them() -> None:
    source = seeded("consistent hash")
    workers = fleet(8)
    for seed in range(50):
        request = some_request(source)
        assert chosen(request, workers, seed) == chosen(request, workers[::-1], seed + 1)


def test_a_hash_means_the_same_in_every_version() -> None:
    """Proxies of two versions side by side send one prompt to one worker."""
    requests = [RoutingRequest(prompt_tokens=64, index_hashes=[key]) for key in KEYS]
    assert [chosen(request, fleet(4)) for request in requests] == ["worker-3", "worker-2", "worker-2", "worker-0"]


def test_prompts_that_begin_alike_meet() -> None:
    source = seeded("begin alike")
    workers = fleet(16)
    first = list(some_request(source, num_blocks=KEY_BLOCKS).index_hashes)
    ends = [[], [1], [2, 3], [4] * 500]
    requests = [RoutingRequest(prompt_tokens=10_000, index_hashes=[*first, *end]) for end in ends]
    assert len({chosen(request, workers) for request in requests}) == 1
    shorter = [
        RoutingRequest(prompt_tokens=10_000, index_hashes=[*first[:-1], source.getrandbits(64)]) for _ in range(50)
    ]
    assert len({chosen(request, workers) for request in shorter}) > 5, "the last block of the key counts"


def test_the_key_has_as_many_tokens_in_blocks_of_any_size() -> None:
    source = seeded("block size")
    hashes = list(some_request(source, num_blocks=8).index_hashes)
    large = RoutingRequest(prompt_tokens=8_192, index_hashes=[*hashes, 1], block_tokens=512.0)
    alike = RoutingRequest(prompt_tokens=8_192, index_hashes=[*hashes, 2], block_tokens=512.0)
    assert (
        chosen(large, fleet(16))
        == chosen(alike, fleet(16))
        == chosen(RoutingRequest(prompt_tokens=512, index_hashes=[hashes[-1]]), fleet(16))
    )


def test_a_new_worker_takes_its_share_and_moves_no_other_key() -> None:
    source = seeded("new worker")
    before, after = fleet(8), fleet(9)
    requests = [some_request(source, num_blocks=3) for _ in range(4_000)]
    moved = Counter(
        (chosen(request, before), chosen(request, after))
        for request in requests
        if chosen(request, before) != chosen(request, after)
    )
    assert {to for _, to in moved} == {"worker-8"}
    # A ninth of 4,000 is 444, deviation 20; from each of the eight 56, deviation 7.
    assert 340 < moved.total() < 550
    assert len(moved) == 8 and max(moved.values()) < 100


def test_the_keys_of_a_worker_that_leaves_spread_over_the_others() -> None:
    source = seeded("worker leaves")
    before = fleet(9)
    requests = [some_request(source, num_blocks=3) for _ in range(4_000)]
    went = Counter(
        chosen(request, before[:4] + before[5:]) for request in requests if chosen(request, before) == "worker-4"
    )
    assert len(went) == 8 and max(went.values()) < 100
    assert all(
        chosen(request, before) == chosen(request, before[:4] + before[5:])
        for request in requests
        if chosen(request, before) != "worker-4"
    )


@pytest.mark.parametrize(("num_home", "num_others", "stays"), [(3, (3, 3, 2), True), (4, (3, 3, 1), False)])
def test_a_worker_with_a_quarter_more_than_the_mean_passes_the_key_on(
    num_home: int, num_others: Sequence[int], stays: bool
) -> None:
    """Of 11 + 1 requests on 4 workers one may have 3.75, rounded up."""
    request = some_request(seeded("bound"))
    home = chosen(request, fleet(4))
    others = iter(num_others)
    loaded = [
        WorkerSnapshot(worker_id=home, num_waiting=num_home - 1, num_running=1)
        if worker.worker_id == home
        else WorkerSnapshot(worker_id=worker.worker_id, num_running=next(others))
        for worker in fleet(4)
    ]
    made = ConsistentHash(random.Random(1)).choose(request, loaded)
    assert (made.worker_id == home) is stays
    ranked = sorted(made.scores, key=lambda worker_id: -made.scores[worker_id])
    assert ranked[0] == home, "scores say whose it is"
    assert made.worker_id == ranked[0 if stays else 1], "the next one by the same numbers"


def test_no_load_is_above_the_bound_while_one_prompt_comes_again_and_again() -> None:
    request = some_request(seeded("one prompt"))
    counts = dict.fromkeys([worker.worker_id for worker in fleet(8)], 0)
    policy = ConsistentHash(random.Random(1))
    for number in range(1, 801):
        workers = [WorkerSnapshot(worker_id=name, num_running=count) for name, count in counts.items()]
        counts[policy.choose(request, workers).worker_id] += 1
        assert max(counts.values()) <= 1.25 * number / 8 + 1
    assert max(counts.values()) == 125, "and the first ones are filled up to it"


def test_a_prompt_without_a_whole_block_goes_to_whoever_has_the_fewest_requests() -> None:
    policy = ConsistentHash(random.Random(1))
    workers = [*fleet(2, num_running=1), WorkerSnapshot(worker_id="a"), WorkerSnapshot(worker_id="b")]
    made = [policy.choose(RoutingRequest(prompt_tokens=63), workers) for _ in range(100)]
    assert {each.worker_id for each in made} == {"a", "b"}
    assert set(made[0].scores.values()) == {0.0}
