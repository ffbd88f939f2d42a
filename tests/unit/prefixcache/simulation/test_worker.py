"""One simulated worker: what goes next, slices and their guards, and what proxies see of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixcache.load import NO_WAITING
from prefixcache.routing.slices import PASSING, slice_tokens
from prefixcache.simulation.costs import PrefillCosts, StepCosts
from prefixcache.simulation.job import Job
from prefixcache.simulation.lru import LruCache
from prefixcache.simulation.mechanisms import ALL, NONE, Mechanisms
from prefixcache.simulation.scenario import Scenario
from prefixcache.simulation.worker import SimWorker
from tests.unit.prefixcache.simulation.traces import BLOCK, request

RATE = 1_024.0
"""Two blocks a second."""
SLICE_BLOCKS = slice_tokens(RATE) // BLOCK
COSTS = PrefillCosts(prefill_rate=RATE, overhead_s=0.0, inter_token_s=0.1)
SCENARIO = Scenario(num_workers=1, capacity_blocks=100, costs=COSTS, load_lag_s=0.0)
RUN_IN = tuple(range(9_000, 9_002))
"""A first prompt, by which the worker has learnt its rate."""


def _worker(scenario: Scenario = SCENARIO, mechanisms: Mechanisms = ALL, *, learnt: bool = True) -> SimWorker:
    cache = LruCache(scenario.capacity_blocks)
    worker = SimWorker("w1", scenario, mechanisms, block_tokens=BLOCK, cache=cache, phase=0.0, rate_factor=1.0)
    if learnt:
        _place(worker, RUN_IN, at=-100.0, output=0)
        _run(worker, until=-50.0)
    return worker


def _place(
    worker: SimWorker, blocks: tuple[int, ...], *, at: float = 0.0, proxy: int = 0, rest: int = 1, output: int = 10
) -> Job:
    job = Job(request(blocks, rest=rest, output=output), number=id(blocks), arrived_at=at, proxy=proxy)
    job.placed_hit_tokens = worker.expected_blocks(job, at) * BLOCK
    job.placed_prefill_s = (job.prompt_tokens - job.placed_hit_tokens) / RATE
    worker.place(job, at)
    worker.begin(at)
    return job


def _run(worker: SimWorker, until: float = 1e9) -> list[tuple[float, Job]]:
    """First tokens up to a time; the worker begins what it can."""
    first: list[tuple[float, Job]] = []
    while worker.engine.next_at <= until:
        now = worker.engine.next_at
        job, _ = worker.advance(now)
        if job is not None:
            first.append((now, job))
        worker.begin(now)
    return first


def _chain(first: int, length: int) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_by_arrival_where_there_is_no_order() -> None:
    worker = _worker(mechanisms=NONE)
    jobs = [_place(worker, _chain(n * 100, length)) for n, length in enumerate((20, 30, 1))]
    assert [job for _, job in _run(worker)] == jobs


def test_short_prefills_go_first_and_a_wait_counts_for_a_tenth() -> None:
    worker = _worker(mechanisms=replace(ALL, slices=False))
    running = _place(worker, _chain(0, 20))
    long, short = _place(worker, _chain(100, 6)), _place(worker, _chain(200, 2))
    assert [job for _, job in _run(worker, until=1e3)] == [running, short, long]
    # 3 s of prefill that have waited for 21 s are before 1 s that has not.
    worker = _worker(mechanisms=replace(ALL, slices=False))
    running = _place(worker, _chain(0, 44))
    old = _place(worker, _chain(100, 6))
    young = _place(worker, _chain(200, 2), at=21.9)
    assert [job for _, job in _run(worker)] == [running, old, young]


def test_a_long_prefill_makes_room_after_each_slice() -> None:
    worker = _worker()
    long = _place(worker, _chain(0, 20))
    short = _place(worker, _chain(100, 2), at=0.5)
    (short_at, first), (long_at, second) = _run(worker)
    assert (first, second) == (short, long)
    assert (short_at, long_at) == pytest.approx((SLICE_BLOCKS / 2 + 1.0, 11.0), abs=0.01)
    # What is left is cut until it is short enough for one piece.
    left, num_slices = 20 * BLOCK + 1, 0
    while left > PASSING * slice_tokens(RATE):
        left, num_slices = left - SLICE_BLOCKS * BLOCK, num_slices + 1
    assert worker.num_slices == num_slices > 2
    assert worker.cached_tokens == 0
    assert worker.cache.depth(long.request.blocks, 20) == 20


def test_what_is_too_long_does_not_pass_a_sliced_prefill() -> None:
    worker = _worker()
    long = _place(worker, _chain(0, 20))
    other = _place(worker, _chain(100, 19), at=0.5)
    short = _place(worker, _chain(200, SLICE_BLOCKS), at=0.5)
    assert [job for _, job in _run(worker)] == [short, long, other]


def test_half_of_what_is_left_passes_and_is_sliced_too() -> None:
    worker = _worker()
    long = _place(worker, _chain(0, 60))
    half = _place(worker, _chain(100, 25), at=0.5)
    _run(worker, until=5.0)
    short = _place(worker, _chain(200, SLICE_BLOCKS), at=5.1)
    assert worker.sliced == [long, half]
    snapshot = worker.snapshot(0, 5.1)
    assert snapshot.waiting_s[4] > 16.0 and snapshot.waiting_s[3] > 4.0
    assert [job for _, job in _run(worker)] == [short, half, long]
    assert worker.cache.depth(long.request.blocks, 60) == 60


def test_what_a_sliced_prefill_loses_meanwhile_is_computed_once_more() -> None:
    worker = _worker(replace(SCENARIO, capacity_blocks=24))
    long = _place(worker, _chain(0, 20))
    passing = [_place(worker, _chain(100 * n, SLICE_BLOCKS), at=0.5) for n in range(1, 9)]
    assert [job for _, job in _run(worker)] == [*passing, long]
    # Eight times a slice pushes the first slice of the long one out.
    computed = 2 * BLOCK + 1 + (20 + SLICE_BLOCKS) * BLOCK + 1 + 8 * (SLICE_BLOCKS * BLOCK + 1)
    assert worker.work_by_minute.total() == computed
    assert worker.cache.depth(long.request.blocks, 20) == 20
    assert worker.cached_tokens == -SLICE_BLOCKS * BLOCK


def test_a_prompt_larger_than_the_cache_is_not_sliced() -> None:
    worker = _worker(replace(SCENARIO, capacity_blocks=10))
    _place(worker, _chain(0, 20))
    _place(worker, _chain(100, 1), at=0.5)
    _run(worker)
    assert worker.num_slices == 0


def test_cached_tokens_are_those_not_computed() -> None:
    worker = _worker()
    _place(worker, _chain(0, 20))
    _run(worker)
    again = _place(worker, (*_chain(0, 20), *_chain(500, 10)), at=100.0)
    assert again.placed_hit_tokens == 20 * BLOCK
    [(first_at, first)] = _run(worker)
    assert first is again
    assert first_at == pytest.approx(105.0, abs=0.01)
    assert worker.cached_tokens == 20 * BLOCK


def test_a_proxy_knows_what_it_has_placed_and_what_runs() -> None:
    worker = _worker()
    asked = Job(request(_chain(0, 30)), number=0, arrived_at=0.0, proxy=0)
    _place(worker, _chain(0, 20))
    _place(worker, _chain(200, 1), at=0.5)
    snapshot = worker.snapshot_for(asked, 0.5)
    assert (snapshot.hit_tokens, snapshot.hit_source) == (16 * BLOCK, "pending")
    assert snapshot.rest_s == pytest.approx(SLICE_BLOCKS / 2 - 0.5, abs=0.01)
    # What is left of the sliced prefill after this slice; and one short prompt waits.
    assert snapshot.waiting_s == pytest.approx((0.0, 0.5, 0.0, 10.0 - SLICE_BLOCKS / 2, 0.0), abs=0.01)
    assert (snapshot.num_waiting, snapshot.num_running) == (1, 1)
    assert snapshot.prefill_rate == pytest.approx(RATE)
    assert snapshot.free_tokens == (100 - 2 - SLICE_BLOCKS) * BLOCK - (BLOCK + 1)
    assert snapshot.running_tokens == 20 * BLOCK + 1 + BLOCK + 1
    assert snapshot.oldest_age_s == pytest.approx(99.5, abs=0.01)
    _run(worker)
    idle = worker.snapshot_for(asked, 500.0)
    assert (idle.rest_s, idle.waiting_s, idle.num_waiting, idle.num_running) == (0.0, NO_WAITING, 0, 0)
    assert (idle.hit_tokens, idle.hit_source) == (20 * BLOCK, "claims")
    assert worker.is_idle


def test_without_pending_claims_only_what_is_stored_is_a_hit() -> None:
    worker = _worker(mechanisms=NONE)
    job = _place(worker, _chain(0, 20))
    assert worker.hit_blocks(job, 0.1) == (0, "claims")
    assert worker.expected_blocks(job, 0.1) == 20
    _run(worker)
    assert worker.hit_blocks(job, 100.0) == (20, "claims")


def test_others_see_a_load_when_it_is_reported() -> None:
    worker = _worker(replace(SCENARIO, num_proxies=2, load_lag_s=0.25), NONE)
    _run(worker)
    _place(worker, _chain(0, 20), at=0.30, proxy=0)
    _place(worker, _chain(100, 1), at=0.31, proxy=0)
    own, other = worker.snapshot(0, 0.32), worker.snapshot(1, 0.32)
    assert (own.num_waiting, own.num_running) == (1, 1)
    assert own.rest_s == pytest.approx(9.98, abs=0.01)
    assert own.waiting_s[1] == pytest.approx(0.5, abs=0.01)
    assert (other.num_waiting, other.num_running, other.rest_s, other.waiting_s) == (0, 0, 0.0, NO_WAITING)
    other = worker.snapshot(1, 0.51)
    assert (other.num_waiting, other.num_running) == (1, 1)
    assert other.rest_s == pytest.approx(9.79, abs=0.01)
    assert other.waiting_s == own.waiting_s


def test_the_rate_is_learnt_and_may_be_wrong() -> None:
    fresh = _worker(learnt=False)
    assert fresh.snapshot(0, 0.0).prefill_rate is None
    cache = LruCache(100)
    wrong = SimWorker("w1", SCENARIO, ALL, block_tokens=BLOCK, cache=cache, phase=0.0, rate_factor=2.0)
    _place(wrong, _chain(0, 4))
    _run(wrong)
    assert wrong.snapshot(0, 100.0).prefill_rate == pytest.approx(2 * RATE)


def test_in_steps_an_answer_keeps_its_blocks_until_it_ends() -> None:
    costs = StepCosts(prefill_us=1_000.0, step_ms=0.0, itl_ms=100.0, itl_per_sequence_ms=0.0, itl_per_1k_context_ms=0.0)
    worker = _worker(Scenario(num_workers=1, capacity_blocks=10, costs=costs, load_lag_s=0.0), learnt=False)
    first = _place(worker, _chain(0, 4), output=2 * BLOCK)
    [(began, _)] = _run(worker, until=3.0)
    assert worker.cache.num_free == 10 - 6
    # It needs seven blocks, and four are to be had before the answer has ended.
    second = _place(worker, _chain(100, 7), at=3.0)
    assert worker.prefilling is None
    assert [job for _, job in _run(worker)] == [second]
    assert began < second.arrived_at
    assert worker.cache.depth(first.request.blocks, 4) == 3


def test_a_dead_worker_hands_back_what_it_had_begun() -> None:
    worker = _worker()
    decoding = _place(worker, _chain(100, 2), at=0.0, output=100)
    _run(worker, until=1.1)
    sliced = _place(worker, _chain(0, 20), at=1.2)
    waiting = _place(worker, _chain(200, 1), at=1.2)
    assert worker.die(2.0) == [sliced, decoding]
    assert worker.waiting == [waiting]
    assert (decoding.prompt_tokens, decoding.output_tokens) == (2 * BLOCK + 1 + 10, 90)
    assert (sliced.computed_tokens, worker.prefilling, worker.sliced) == (0, None, [])
