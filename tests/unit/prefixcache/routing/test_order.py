"""What goes first."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.routing.order import Order, order_key

ORDERS: tuple[Order, ...] = get_args(Order)
times = st.floats(0, 1_000)


def first(order: Order, *requests: tuple[float, float]) -> int:
    """Place of the (prefill_s, waited_s) that goes first."""
    keys = [order_key(order, prefill_s=prefill_s, waited_s=waited_s) for prefill_s, waited_s in requests]
    return keys.index(min(keys))


@pytest.mark.parametrize("order", ORDERS)
def test_the_shorter_of_two_goes_first_and_of_equals_the_older(order: Order) -> None:
    assert first(order, (2.0, 1.0), (0.1, 1.0)) == 1
    assert first(order, (2.0, 1.0), (2.0, 1.5)) == 1


def test_by_mean_ten_seconds_of_waiting_make_up_for_three_of_prefill() -> None:
    assert order_key("mean", prefill_s=5.0, waited_s=10.0) == 2.0
    assert first("mean", (3.0, 6.6), (1.0, 0.0)) == 1
    assert first("mean", (3.0, 6.7), (1.0, 0.0)) == 0


def test_by_tail_it_is_the_share_of_its_own_work_in_its_time() -> None:
    assert order_key("tail", prefill_s=0.5, waited_s=3.0) == 0.25
    assert first("tail", (3.0, 20.0), (1.0, 0.0)) == 0
    assert first("tail", (3.0, 0.0), (1.0, 0.0)) in (0, 1)
    assert order_key("tail", prefill_s=3.0, waited_s=0.0) == order_key("tail", prefill_s=1.0, waited_s=0.0) == 1.0


@given(prefill_s=times, others=st.lists(times, min_size=1, max_size=5))
@pytest.mark.parametrize("order", ORDERS)
def test_nothing_waits_for_ever(order: Order, prefill_s: float, others: list[float]) -> None:
    """Whoever has waited long enough goes before any that come now; how long depends on its own prefill alone."""
    waited_s = 10.0 * prefill_s + 1.0
    assert first(order, (prefill_s, waited_s), *((other_s, 0.0) for other_s in others)) == 0


@given(st.lists(st.tuples(times, times), min_size=2, max_size=5), times)
def test_waiting_together_never_changes_the_order_by_mean(requests: list[tuple[float, float]], more_s: float) -> None:
    def ordered(later_s: float) -> list[float]:
        return [order_key("mean", prefill_s=own, waited_s=waited + later_s) for own, waited in requests]

    now, later = ordered(0.0), ordered(more_s)
    for key, later_key in zip(now, later, strict=True):
        assert later_key - min(later) == pytest.approx(key - min(now), abs=1e-6)


@given(prefill_s=times, waited_s=times, jump_s=st.floats(-1e12, 0))
@pytest.mark.parametrize("order", ORDERS)
def test_a_clock_that_went_back_is_no_wait(order: Order, prefill_s: float, waited_s: float, jump_s: float) -> None:
    fresh = order_key(order, prefill_s=prefill_s, waited_s=0.0)
    assert order_key(order, prefill_s=prefill_s, waited_s=jump_s) == fresh
    assert order_key(order, prefill_s=prefill_s, waited_s=waited_s) <= fresh
