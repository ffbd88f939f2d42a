"""Rates to go by."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefixcache.limits import DEFAULT_PREFILL_RATE
from prefixcache.routing.base import WorkerSnapshot
from prefixcache.routing.rates import prefill_rates, usual_rate


def _rated(*rates: float | None) -> Sequence[WorkerSnapshot]:
    return [WorkerSnapshot(worker_id=f"w{n}", prefill_rate=rate) for n, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("known", "rates"),
    [
        ((None, None), [DEFAULT_PREFILL_RATE, DEFAULT_PREFILL_RATE]),
        ((500.0, None, 1_500.0), [500.0, 1_000.0, 1_500.0]),
        ((8_000.0, None), [8_000.0, 8_000.0]),
        ((8_000.0, 0.0), [8_000.0, 8_000.0]),
    ],
)
def test_an_unknown_rate_is_the_mean_of_the_known(known: tuple[float | None, ...], rates: list[float]) -> None:
    assert list(prefill_rates(_rated(*known)).values()) == rates


def test_the_usual_rate_without_any() -> None:
    assert usual_rate([]) == DEFAULT_PREFILL_RATE
