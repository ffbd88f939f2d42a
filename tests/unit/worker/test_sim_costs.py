"""The time of a simulated step, term by term."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from prefixcache.errors import ConfigError
from tests.support.requests import sample_spec
from worker.runner import StepShare
from worker.sim_costs import CostModel

FREE = CostModel(prefill_us=0, step_ms=0, itl_ms=0, itl_per_sequence_ms=0, itl_per_1k_context_ms=0)
ATTENTION = replace(FREE, prefill_us_per_1k_context=50)


def prefill(num_tokens: int, start: int = 0) -> StepShare:
    blocks = -(-(start + num_tokens) // 16)
    return StepShare(token_ids=[7] * num_tokens, start=start, block_table=range(blocks), sample=None)


def decode(context_tokens: int) -> StepShare:
    blocks = -(-context_tokens // 16)
    return StepShare(token_ids=[7], start=context_tokens - 1, block_table=range(blocks), sample=sample_spec())


@pytest.mark.parametrize(
    ("costs", "shares", "step_s"),
    [
        (FREE, [prefill(512), decode(100)], 0.0),
        (CostModel(prefill_us=100), [prefill(512)], 0.001 + 0.0512),
        (CostModel(prefill_us=100), [prefill(300), prefill(212, start=1600)], 0.001 + 0.0512),
        (CostModel(step_ms=3, prefill_us=0), [prefill(512)], 0.003),
        (ATTENTION, [prefill(400)], 400 * 0.2 * 50e-6),
        (ATTENTION, [prefill(400, start=1600), prefill(100, start=160), decode(900)], (400 * 1.8 + 100 * 0.21) * 50e-6),
        (CostModel(step_ms=0, itl_ms=20, itl_per_sequence_ms=0, itl_per_1k_context_ms=0), [decode(9)], 0.020),
        (CostModel(step_ms=0, itl_ms=20, itl_per_sequence_ms=2, itl_per_1k_context_ms=0), [decode(9)] * 8, 0.036),
        (CostModel(step_ms=0, itl_ms=0, itl_per_sequence_ms=0, itl_per_1k_context_ms=5), [decode(500)] * 4, 0.010),
        (
            CostModel(step_ms=1, prefill_us=50, itl_ms=10, itl_per_sequence_ms=0.5, itl_per_1k_context_ms=1),
            [decode(1000), decode(3000), prefill(200)],
            0.001 + 0.010 + 0.010 + 2 * 0.0005 + 4 * 0.001,
        ),
    ],
)
def test_each_term(costs: CostModel, shares: list[StepShare], step_s: float) -> None:
    assert costs.step_s(shares) == pytest.approx(step_s)


def test_speed_divides_everything() -> None:
    shares, costs = [decode(2000), prefill(400)], CostModel(prefill_us_per_1k_context=300)
    assert replace(costs, speed=8).step_s(shares) == pytest.approx(costs.step_s(shares) / 8)
    assert CostModel(speed=math.inf).step_s(shares) == 0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_none_is_named(value: float) -> None:
    with pytest.raises(ConfigError, match=r"--sim-itl-per-1k-context-ms is .*; it must be a finite number, at least 0"):
        CostModel(itl_per_1k_context_ms=value)


@pytest.mark.parametrize("value", [0.0, -2.0, math.nan])
def test_a_speed_that_is_none_is_named(value: float) -> None:
    with pytest.raises(ConfigError, match="--sim-speed is"):
        CostModel(speed=value)
