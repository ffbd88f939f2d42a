"""What is believed of a step's time after steps of known cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from prefixcache.limits import DEFAULT_PREFILL_RATE
from tests.support.seeds import seeded
from worker.runner import StepShare
from worker.sim_costs import CostModel
from worker.step_costs import MOST_SURPRISING, ChunkCost, StepCosts, StepWork, pairs

CPU = CostModel(
    prefill_us=1_000,
    prefill_us_per_1k_context=1_000,
    step_ms=0,
    itl_ms=20,
    itl_per_sequence_ms=5,
    itl_per_1k_context_ms=5,
)
"""Of the order of a small model on one core: behind 1,000 tokens a row takes twice as long."""
SHAPE = 1 / 3_000
"""What such a model's shape says of a pair."""


def work_of(chunks: Sequence[tuple[int, int]], contexts: Sequence[int] = ()) -> StepWork:
    """Chunks as (start, tokens), decodes by their contexts."""
    return StepWork(
        chunk_tokens=sum(num_tokens for _, num_tokens in chunks),
        chunk_pairs=sum(pairs(start, num_tokens) for start, num_tokens in chunks),
        num_decodes=len(contexts),
        context_tokens=sum(contexts),
    )


def step_s(chunks: Sequence[tuple[int, int]], contexts: Sequence[int] = (), costs: CostModel = CPU) -> float:
    shares = [StepShare(token_ids=range(count), start=start, block_table=(), sample=None) for start, count in chunks]
    shares += [StepShare(token_ids=(1,), start=context - 1, block_table=(), sample=None) for context in contexts]
    return costs.step_s(shares)


def observe(
    costs: StepCosts,
    chunks: Sequence[tuple[int, int]],
    contexts: Sequence[int] = (),
    model: CostModel = CPU,
    noise: float = 1.0,
) -> None:
    costs.observe(work_of(chunks, contexts), step_s(chunks, contexts, model) * noise)


def history(costs: StepCosts, random: Random, *, steps: int, noise: float, model: CostModel = CPU) -> None:
    """Prompts chunk by chunk, beside decodes and without, and steps of decodes alone."""
    start, contexts = 0, list[int]()
    for _ in range(steps):
        if random.random() < 0.1:
            contexts = [random.randrange(50, 3_000) for _ in range(random.randrange(20))]
        num_tokens = random.choice([512, 512, 496, random.randrange(2, 512)])
        chunks = [(start, num_tokens)] if random.random() < 0.7 or not contexts else []
        observe(costs, chunks, contexts, model, random.uniform(1 - noise, 1 + noise))
        start = start + num_tokens if chunks and start < 8_000 else 0


def chunk_s(costs: StepCosts, start: int, num_tokens: int) -> float:
    return costs.chunk_cost.seconds(num_tokens, pairs(start, num_tokens))


def test_pairs_are_counted_by_causality() -> None:
    assert pairs(0, 512) == pytest.approx(sum(range(1, 513)), rel=0.01)
    assert pairs(1_000, 512) == pytest.approx(sum(range(1_001, 1_513)), rel=0.01)


def test_before_the_first_step_it_is_the_usual_speed_and_the_shape_of_the_model() -> None:
    cost = StepCosts(pair_rows=SHAPE).chunk_cost
    assert cost.token_s == 1 / DEFAULT_PREFILL_RATE
    assert cost.pair_s == pytest.approx(cost.token_s * SHAPE)


def test_one_chunk_tells_the_speed_and_the_shape_the_rest() -> None:
    costs = StepCosts(pair_rows=SHAPE)
    observe(costs, [(0, 512)])
    assert chunk_s(costs, 0, 512) == pytest.approx(step_s([(0, 512)]), rel=0.02)
    assert costs.chunk_cost.pair_s == pytest.approx(costs.chunk_cost.token_s * SHAPE, rel=0.25)


@pytest.mark.parametrize("pair_rows", [0.0, SHAPE, 10 * SHAPE], ids=["unknown", "too little", "too much"])
@pytest.mark.parametrize(("steps", "noise", "within"), [(60, 0.0, 0.2), (150, 0.3, 0.35)])
def test_chunks_are_known_at_every_depth_after_some_steps(
    pair_rows: float, steps: int, noise: float, within: float
) -> None:
    costs = StepCosts(pair_rows=pair_rows)
    history(costs, seeded(f"history {pair_rows} {noise}"), steps=steps, noise=noise)
    for start in (0, 1_000, 4_000, 8_000):
        assert chunk_s(costs, start, 400) == pytest.approx(step_s([(start, 400)]), rel=within)


def test_what_decodes_take_is_not_the_chunks() -> None:
    costs = StepCosts(pair_rows=SHAPE)
    contexts = [1_000] * 40
    for _ in range(30):
        observe(costs, [], contexts)
    for start in range(0, 4_096, 512):
        observe(costs, [(start, 472)], contexts)
    for start in (0, 2_000):
        assert chunk_s(costs, start, 400) == pytest.approx(step_s([(start, 400)]), rel=0.15)


def test_decodes_that_never_were_alone_make_chunks_seem_dear_never_cheap() -> None:
    costs = StepCosts(pair_rows=SHAPE)
    for start in range(0, 4_096, 256):
        observe(costs, [(start, 256)], [1_000] * 40)
    for start in (0, 1_000, 4_000):
        assert chunk_s(costs, start, 256) > 0.9 * step_s([(start, 256)])


def test_many_decode_steps_do_not_make_it_forget_what_chunks_take() -> None:
    costs = StepCosts(pair_rows=SHAPE)
    history(costs, seeded("long ago"), steps=40, noise=0.0)
    before = costs.chunk_cost
    for _ in range(5_000):
        observe(costs, [], [500])
    assert costs.chunk_cost == before


def test_tails_do_not_drown_full_chunks() -> None:
    costs = StepCosts(pair_rows=SHAPE)
    slow_tail = CostModel(prefill_us=1_000, prefill_us_per_1k_context=1_000, step_ms=20)
    for _ in range(20):
        observe(costs, [(0, 512)], model=slow_tail)
        for _ in range(5):
            observe(costs, [(0, 16)], model=slow_tail)
    assert chunk_s(costs, 0, 512) == pytest.approx(step_s([(0, 512)], costs=slow_tail), rel=0.1)


def test_a_change_of_speed_is_followed() -> None:
    """As when something else begins to run beside it: everything takes five times as long."""
    costs, slow = StepCosts(pair_rows=SHAPE), replace(CPU, speed=0.2)
    history(costs, seeded("fast"), steps=300, noise=0.0)
    history(costs, seeded("slow"), steps=150, noise=0.0, model=slow)
    assert chunk_s(costs, 2_000, 400) == pytest.approx(step_s([(2_000, 400)], costs=slow), rel=0.25)


def test_a_machine_that_stood_still_for_one_step_was_not_slow() -> None:
    costs = StepCosts(pair_rows=SHAPE)
    history(costs, seeded("before it stood"), steps=60, noise=0.0)
    before_s = chunk_s(costs, 0, 512)
    observe(costs, [(0, 512)], noise=1_000)
    assert chunk_s(costs, 0, 512) < (1 + MOST_SURPRISING / 10) * before_s


def test_steps_that_take_no_time_bound_nothing() -> None:
    costs = StepCosts(pair_rows=SHAPE)
    costs.observe(work_of([(0, 512)], [7]), 0.0)
    costs.observe(work_of([], [7]), 0.0)
    assert costs.chunk_cost.num_tokens(100_000, 0.5) == math.inf
    assert costs.split(work_of([(0, 512)], [7]), 0.0) == (0.0, 0.0)


def test_a_step_is_divided_by_what_its_parts_would_take_alone() -> None:
    costs = StepCosts(pair_rows=SHAPE)
    history(costs, seeded("divided"), steps=300, noise=0.0)
    chunks, contexts = [(1_000, 256)], [2_000] * 10
    seconds = step_s(chunks, contexts)
    prefill_s, decode_s = costs.split(work_of(chunks, contexts), seconds)
    assert prefill_s + decode_s == pytest.approx(seconds)
    assert decode_s == pytest.approx(step_s([], contexts), rel=0.35)
    assert costs.split(work_of([], contexts), 0.3) == (0.0, 0.3)
    assert costs.split(work_of(chunks), 0.3) == (0.3, 0.0)


@pytest.mark.parametrize("pair_s", [0.0, 1e-9, 1e-6])
@pytest.mark.parametrize("start", [0, 4_000])
def test_the_longest_chunk_of_a_time_takes_that_time(start: int, pair_s: float) -> None:
    cost = ChunkCost(token_s=0.001, pair_s=pair_s)
    num_tokens = cost.num_tokens(start, 0.25)
    assert cost.token_s * num_tokens + cost.pair_s * num_tokens * (start + num_tokens / 2) == pytest.approx(0.25)
