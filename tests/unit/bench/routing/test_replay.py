"""What a run's requests would have found in one cache for all."""

from __future__ import annotations

import json

import pytest

from tests.bench.routing.replay import Prefill, hit_rate, imbalance, pooled_hit_rate, read_prefills


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


def test_imbalance_is_the_busiest_over_the_mean_and_knows_of_idle_ones() -> None:
    assert imbalance(RUN, 2) == pytest.approx(1.5)
    assert imbalance(RUN, 4) == pytest.approx(3.0)
