"""How long the chunks of a step may be."""

from __future__ import annotations

import math

import pytest

from worker.step_budget import StepBudget
from worker.step_costs import ChunkCost, pairs

COST = ChunkCost(token_s=0.001, pair_s=1e-6)
"""Behind 1,000 tokens a token takes twice as long."""


def budget(seconds: float, *, num_tokens: int = 512, cost: ChunkCost = COST) -> StepBudget:
    return StepBudget(num_tokens=num_tokens, least_tokens=16, cost=cost, seconds=seconds)


def test_without_a_limit_in_time_tokens_alone_count() -> None:
    free = budget(math.inf)
    assert free.num_tokens_from(100_000) == 512
    free.take(100_000, 500)
    assert (free.num_tokens_from(0), free.is_spent) == (12, False)
    free.take(0, 12)
    assert (free.num_tokens_from(0), free.is_spent) == (0, True)


@pytest.mark.parametrize("start", [0, 500, 1_000, 3_000, 10_000])
def test_a_chunk_takes_the_time_there_is_and_no_more(start: int) -> None:
    num_tokens = budget(0.3).num_tokens_from(start)
    assert COST.seconds(num_tokens, pairs(start, num_tokens)) <= 0.3
    assert COST.seconds(num_tokens + 1, pairs(start, num_tokens + 1)) > 0.3


def test_tokens_bound_what_time_would_allow() -> None:
    assert budget(5.0).num_tokens_from(0) == 512
    assert budget(0.5, cost=ChunkCost(token_s=0.0, pair_s=0.0)).num_tokens_from(9_000) == 512


def test_the_first_chunk_is_a_block_whatever_it_takes_and_further_ones_are_none() -> None:
    deep = budget(0.1)
    assert deep.num_tokens_from(100_000) == 16
    deep.take(100_000, 16)
    assert deep.is_spent
    assert deep.num_tokens_from(0) == deep.num_tokens_from(100_000) == 0


def test_a_block_is_not_more_than_the_tokens_that_are_left() -> None:
    assert budget(0.001, num_tokens=7).num_tokens_from(50_000) == 7


def test_what_one_chunk_leaves_is_the_next_ones() -> None:
    shared = budget(0.3)
    shared.take(1_000, 50)
    left_s = 0.3 - COST.seconds(50, pairs(1_000, 50))
    num_tokens = shared.num_tokens_from(0)
    assert COST.seconds(num_tokens, pairs(0, num_tokens)) <= left_s
    assert num_tokens == int(COST.num_tokens(0, left_s))
