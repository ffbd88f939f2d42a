"""What a prompt costs the cache that takes it in, in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from prefixcache.routing.base import RoutingRequest, WorkerSnapshot
from prefixcache.routing.memory_prices import (
    COPY_PRICE,
    CROWDED_FILL,
    CROWDING_PRICE,
    FLOCKING_PRICE,
    MOST_FLOCKING,
    displaced_price_tokens,
    sharing_prices_tokens,
)


def cache(**fields: Any) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id="w", **fields)


@pytest.mark.parametrize(
    ("fields", "price"),
    [
        ({}, 0.0),
        ({"free_tokens": 1_000.0}, 0.0),
        ({"free_tokens": 999.0}, 2.0),
        ({"free_tokens": 0.0}, 2_000.0),
        ({"free_tokens": -5.0}, 2_000.0),
        ({"free_tokens": 400.0, "oldest_age_s": 180.0}, 1_200.0 / math.e),
        ({"free_tokens": 0.0, "oldest_age_s": -1e12}, 2_000.0),
        ({"free_tokens": 0.0, "oldest_age_s": 1e12}, 0.0),
        ({"held_tokens": 9_000.0, "capacity_tokens": 10_000.0}, 0.0),
        ({"held_tokens": 9_400.0, "capacity_tokens": 10_000.0}, 800.0),
        ({"held_tokens": 20_000.0, "capacity_tokens": 10_000.0}, 2_000.0),
        ({"held_tokens": 20_000.0}, 0.0),
        ({"free_tokens": 700.0, "held_tokens": 20_000.0, "capacity_tokens": 10_000.0}, 600.0),
    ],
)
def test_of_a_thousand_tokens_those_without_room_are_paid_twice(fields: dict[str, Any], price: float) -> None:
    assert displaced_price_tokens(cache(**fields), 1_000) == pytest.approx(price)


def test_what_is_there_already_displaces_nothing() -> None:
    assert displaced_price_tokens(cache(free_tokens=0.0), 0) == 0.0


PROMPT = RoutingRequest(prompt_tokens=1_000)


def full(held: float, **fields: Any) -> WorkerSnapshot:
    """One of several caches of 10,000 tokens."""
    return cache(held_tokens=held, capacity_tokens=10_000.0, **fields)


def sharing_prices(workers: list[WorkerSnapshot]) -> Sequence[float] | None:
    uncached = [worker.uncached_tokens(PROMPT) for worker in workers]
    return sharing_prices_tokens(workers, uncached, PROMPT.prompt_tokens)


def of_crowding(workers: list[WorkerSnapshot]) -> list[float]:
    """Without the price of copies, which is the same for all that have nothing of the prompt."""
    prices = sharing_prices(workers)
    assert prices is not None
    return [price - COPY_PRICE * worker.uncached_tokens(PROMPT) for price, worker in zip(prices, workers, strict=True)]


def test_crowding_is_what_a_cache_then_holds_beyond_its_share() -> None:
    """Two thirds full, 8,000 would be beyond a share of 20,000 / 3 by 1,333, and by another 1,000 with the prompt."""
    fleet = [full(8_000.0), full(8_000.0, hit_tokens=1_000), full(4_000.0)]
    beyond = 0.8 - 2 / 3
    assert of_crowding(fleet) == pytest.approx(
        [CROWDING_PRICE * 1_000 * (beyond + 0.1), CROWDING_PRICE * 1_000 * beyond, 0.0]
    )


def test_caches_that_are_nearly_empty_are_crowded_in_proportion() -> None:
    """A sixteenth of them is filled, half of what makes crowding count in full."""
    held = 20_000 * CROWDED_FILL / 2
    fleet = [full(held, hit_tokens=1_000), full(0.0, hit_tokens=1_000)]
    assert of_crowding(fleet) == pytest.approx([CROWDING_PRICE / 2 * 1_000 * CROWDED_FILL / 2, 0.0])


def test_prices_weigh_against_a_prompt_alike_whatever_the_scale() -> None:
    """Caches and prompts ten times as large: all prices are ten times as high, and so is what they are weighed against.
    Where only the caches grow, what lies beyond a share by as many tokens as before is worth less."""
    small, large, roomy = (
        sharing_prices_tokens(
            [
                cache(held_tokens=held * size, recent_tokens=2_000 * size, capacity_tokens=room, num_running=2)
                for held, size in ((8_000.0, size), (5_000.0, size / 2))
            ],
            [400 * size, 500 * size],
            500 * size,
        )
        for size, room in ((1, 10_000.0), (10, 100_000.0), (1, 100_000.0))
    )
    assert small is not None and large is not None and roomy is not None
    assert large == pytest.approx([10 * price for price in small])
    assert roomy[0] - COPY_PRICE * 400 < (small[0] - COPY_PRICE * 400) / 5


def test_a_chat_does_not_move_where_it_would_only_crowd_another_cache() -> None:
    here, there = of_crowding([full(5_500.0, hit_tokens=900), full(5_000.0)])
    assert here < there


def test_shares_are_by_capacity() -> None:
    alike = [cache(held_tokens=size / 5, capacity_tokens=size, hit_tokens=1_000) for size in (30_000.0, 10_000.0)]
    assert sharing_prices(alike) == pytest.approx([0.0, 0.0])


def test_empty_caches_are_crowded_by_nothing() -> None:
    assert of_crowding([full(0.0), full(0.0)]) == pytest.approx([0.0, 0.0])


def test_what_is_computed_here_and_held_elsewhere_has_the_price_of_a_copy() -> None:
    prices = sharing_prices([full(0.0), full(0.0, hit_tokens=600), full(0.0, hit_tokens=1_000)])
    assert prices == pytest.approx([COPY_PRICE * 1_000, COPY_PRICE * 400, 0.0])


@pytest.mark.parametrize(("num_requests", "busy"), [(0, 0.0), (1, 0.5), (2, 1.0), (9, 4.5), (99, MOST_FLOCKING)])
def test_who_had_more_than_its_share_of_late_pays_for_each_request_in_hand(num_requests: int, busy: float) -> None:
    fleet = [
        full(0.0, hit_tokens=1_000, recent_tokens=9_000.0, num_waiting=num_requests),
        full(0.0, hit_tokens=1_000, recent_tokens=1_000.0),
    ]
    assert sharing_prices(fleet) == pytest.approx([FLOCKING_PRICE * busy * 1_000 * 0.4, 0.0])


def test_there_are_no_shares_where_a_capacity_is_not_known() -> None:
    assert sharing_prices([full(5.0), cache(held_tokens=5.0)]) is None
