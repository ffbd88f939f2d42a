"""What a run's requests would have found in one cache for all."""

from __future__ import annotations

import json

import pytest

from tests.bench.routing.replay import (
    Prefill,
    hit_rate,
    imbalance,
    partitioned_hit_rate,
    pooled_hit_rate,
    read_prefills,
)


def _prefill(worker: str, num_tokens: int, cached_tokens: int, *blocks: int) -> Prefill:
    return Prefill(worker=worker, num_tokens=num_tokens, cached_tokens=cached_tokens, blocks=blocks)


RUN = [
    _prefill("a", 9, 0, 1, 2),
    _prefill("b", 9, 0, 1, 2),
    _prefill("a", 9, 0, 7, 8),
    _prefill("a", 13, 4, 1, 2, 3),
]
"""Blocks of four tokens."""


def test_lines_of_the_log_are_prefills() -> None:
    lines = [json.dumps({"t": 1.5, "worker": "8100", "n": 9, "cached": 4, "blocks": [3, 4]})]
    assert read_prefills(lines) == [_prefill("8100", 9, 4, 3, 4)]


def test_hit_rate_is_weighed_by_tokens() -> None:
    assert hit_rate(RUN) == pytest.approx(4 / 40)


def test_the_bound_is_what_an_infinite_shared_cache_finds() -> None:
    assert pooled_hit_rate(RUN, capacity_blocks=None, block_tokens=4) == pytest.approx((8 + 8) / 40)


def test_a_pooled_cache_evicts() -> None:
    assert pooled_hit_rate(RUN, capacity_blocks=3, block_tokens=4) == pytest.approx((8 + 4) / 40)
    assert pooled_hit_rate(RUN, capacity_blocks=2, block_tokens=4) == pytest.approx(8 / 40)


CHATS = [
    _prefill("a", 13, 0, 1, 2, 10),
    _prefill("a", 13, 0, 1, 2, 20),
    _prefill("a", 13, 0, 7, 8, 30),
    _prefill("a", 13, 0, 7, 8, 40),
    _prefill("a", 17, 0, 1, 2, 10, 11),
    _prefill("a", 17, 0, 7, 8, 40, 41),
    _prefill("a", 21, 0, 1, 2, 10, 11, 12),
]
"""Two chats behind each of two system prompts of two blocks; the last turns are of the first and the fourth."""


@pytest.mark.parametrize(
    ("num_engines", "capacity_blocks", "cached_tokens"),
    [
        (1, 20, 8 + 8 + 12 + 12 + 16),
        (2, 20, 8 + 8 + 12 + 12 + 16),
        (2, 4, 8 + 8 + 12 + 12 + 16),
        (2, 3, 8 + 8 + 8 + 12 + 12),
        (4, 20, 12 + 12 + 16),
    ],
)
def test_chats_that_stay_on_their_engines_find_what_is_left_there(
    num_engines: int, capacity_blocks: int, cached_tokens: int
) -> None:
    """With two engines each has a system prompt and its chats; with four each chat is alone, and computes its own."""
    rate = partitioned_hit_rate(CHATS, num_engines=num_engines, capacity_blocks=capacity_blocks, block_tokens=4)
    assert rate == pytest.approx(cached_tokens / sum(prefill.num_tokens for prefill in CHATS))


def test_more_engines_than_chats_are_no_harm() -> None:
    assert partitioned_hit_rate(CHATS[:1], num_engines=4, capacity_blocks=9, block_tokens=4) == 0.0


def test_imbalance_is_the_busiest_over_the_mean_and_knows_of_idle_ones() -> None:
    assert imbalance(RUN, 2) == pytest.approx(1.5)
    assert imbalance(RUN, 4) == pytest.approx(3.0)
