"""What the pace says after steps of known cost."""

from __future__ import annotations

import pytest

from worker.pace import FORGOTTEN_DECODE_STEPS, FORGOTTEN_TOKENS, Pace
from worker.runner import StepShare
from worker.sim_costs import CostModel
from worker.step_costs import StepWork

COSTS = CostModel()


def share(num_tokens: int) -> StepShare:
    return StepShare(token_ids=range(num_tokens), start=1_000, block_table=(), sample=None)


def step_s(num_tokens: int, num_decodes: int = 0, costs: CostModel = COSTS) -> float:
    return costs.step_s([share(num_tokens), *[share(1)] * num_decodes])


def run(pace: Pace, num_tokens: int, num_decodes: int = 0, costs: CostModel = COSTS) -> None:
    observe(pace, step_s(num_tokens, num_decodes, costs), num_tokens, num_decodes)


def observe(pace: Pace, seconds: float, num_tokens: int = 0, num_decodes: int = 0) -> None:
    work = StepWork(chunk_tokens=num_tokens, chunk_pairs=0, num_decodes=num_decodes, context_tokens=num_decodes)
    pace.observe(work, seconds)


def test_nothing_is_said_before_it_was_measured() -> None:
    pace = Pace(pair_rows=0.0)
    assert (pace.prefill_rate, pace.inter_token_latency_s) == (0, 0)
    observe(pace, 0.5, num_decodes=3)
    assert (pace.prefill_rate, pace.inter_token_latency_s) == (0, 0.5)
    pace = Pace(pair_rows=0.0)
    observe(pace, 0.5, num_tokens=100, num_decodes=0)
    assert (pace.prefill_rate, pace.inter_token_latency_s) == (200, 0)


def test_steps_that_take_no_time_give_no_rate() -> None:
    pace = Pace(pair_rows=0.0)
    observe(pace, 0.0, num_tokens=100, num_decodes=1)
    assert (pace.prefill_rate, pace.inter_token_latency_s) == (0, 0)


@pytest.mark.parametrize("num_decodes", [0, 32])
@pytest.mark.parametrize("tails_a_chunk", [1, 10, 30])
def test_tails_do_not_drown_the_chunks(tails_a_chunk: int, num_decodes: int) -> None:
    """At 30 tails a chunk beside 32 decodes, tokens by seconds would be a fifth of it."""
    pace = Pace(pair_rows=0.0)
    for _ in range(40):
        run(pace, 512, num_decodes)
        for _ in range(tails_a_chunk):
            run(pace, 16, num_decodes)
        assert pace.prefill_rate == pytest.approx(512 / step_s(512, num_decodes), rel=0.25)


def test_a_few_chunks_outweigh_many_tails_before_them() -> None:
    pace = Pace(pair_rows=0.0)
    for _ in range(200):
        run(pace, 16, num_decodes=8)
    assert pace.prefill_rate < 0.3 * 512 / step_s(512, 8)
    for _ in range(6):
        run(pace, 512, num_decodes=8)
    assert pace.prefill_rate == pytest.approx(512 / step_s(512, 8), rel=0.25)


def test_a_change_of_speed_is_followed() -> None:
    pace, slow = Pace(pair_rows=0.0), CostModel(speed=0.5)
    for _ in range(100):
        run(pace, 512)
    for _ in range(3 * FORGOTTEN_TOKENS // 512):
        run(pace, 512, costs=slow)
    assert pace.prefill_rate == pytest.approx(512 / step_s(512, costs=slow), rel=0.1)
    before = pace.prefill_rate
    for _ in range(5):
        run(pace, 512)
    assert pace.prefill_rate == pytest.approx(before, rel=0.2), "a few steps do not turn it over"


def test_inter_token_latency_is_a_mean_of_the_latest_steps() -> None:
    pace = Pace(pair_rows=0.0)
    observe(pace, 0.010, num_decodes=1)
    for _ in range(100):
        observe(pace, 0.030, num_decodes=1)
    assert pace.inter_token_latency_s == pytest.approx(0.030, rel=0.01)
    observe(pace, 0.030 + FORGOTTEN_DECODE_STEPS * 0.001, num_decodes=1)
    assert pace.inter_token_latency_s == pytest.approx(0.031, rel=0.01)
