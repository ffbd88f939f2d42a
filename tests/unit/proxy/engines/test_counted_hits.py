"""Predictions judged by an engine's own counter of cached tokens."""

from __future__ import annotations

import pytest

from proxy.engines.counted_hits import TOLERANCE, WINDOW_TOKENS, CountedHits


def begun(counted_tokens: float = 1_000.0) -> CountedHits:
    hits = CountedHits()
    assert hits.take(counted_tokens) is None
    return hits


@pytest.mark.parametrize(
    ("counted_tokens", "is_below"),
    [(0, True), (WINDOW_TOKENS * (1 - TOLERANCE) - 1, True), (WINDOW_TOKENS * (1 - TOLERANCE), False), (10**9, False)],
)
def test_a_full_window_is_judged_once(counted_tokens: float, is_below: bool) -> None:
    hits = begun()
    hits.predict(WINDOW_TOKENS)
    assert hits.take(1_000.0 + counted_tokens) == is_below
    assert hits.take(1_000.0 + counted_tokens) is None


def test_a_window_waits_until_it_is_full() -> None:
    hits = begun()
    for _ in range(3):
        hits.predict(WINDOW_TOKENS // 4)
        assert hits.take(1_000.0) is None
    hits.predict(WINDOW_TOKENS // 4)
    assert hits.take(1_000.0) is True


@pytest.mark.parametrize("counted_tokens", [None, 999.0])
def test_a_counter_that_is_missing_or_fell_begins_a_window(counted_tokens: float | None) -> None:
    hits = begun()
    hits.predict(WINDOW_TOKENS)
    assert hits.take(counted_tokens) is None
    assert hits.take(1_000.0) is None
    hits.predict(WINDOW_TOKENS)
    assert hits.take(1_000.0) is True
