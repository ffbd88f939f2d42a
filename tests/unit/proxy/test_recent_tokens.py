"""Prompt tokens placed of late: what fades, and by what."""

from __future__ import annotations

import math

import pytest

from proxy.recent_tokens import RecentTokens


def test_nothing_was_placed() -> None:
    assert RecentTokens().of("a") == 0.0


def test_what_was_placed_counts_whole() -> None:
    recent = RecentTokens()
    recent.place("a", 500, forgotten_tokens=1_000.0)
    assert recent.of("a") == 500.0


def test_it_fades_with_what_is_placed_anywhere_not_with_time() -> None:
    recent = RecentTokens()
    recent.place("a", 500, forgotten_tokens=1_000.0)
    recent.place("b", 1_000, forgotten_tokens=1_000.0)
    assert recent.of("a") == pytest.approx(500 / math.e)
    assert recent.of("b") == 1_000.0
    recent.place("a", 100, forgotten_tokens=1_000.0)
    assert recent.of("a") == pytest.approx(500 * math.exp(-1.1) + 100)


def test_a_larger_fleet_forgets_later() -> None:
    recent = RecentTokens()
    recent.place("a", 500, forgotten_tokens=1e6)
    recent.place("b", 1_000, forgotten_tokens=1e6)
    assert recent.of("a") == pytest.approx(500, rel=0.01)
