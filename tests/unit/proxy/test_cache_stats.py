"""Sums over sliding windows, compared with a plain list."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cache_stats import CacheStats, cache_counts
from tests.support.manual_clock import ManualClock


def test_empty() -> None:
    nothing = {"prompt_tokens": 0, "cached_tokens": 0, "hit_rate": None}
    assert msgspec.to_builtins(CacheStats().report()) == {
        "total": {"1m": nothing, "15m": nothing, "since_start": nothing},
        "models": {},
    }


def test_models_and_total_add_up() -> None:
    stats = CacheStats(ManualClock())
    stats.record("a", prompt_tokens=300, cached_tokens=100)
    stats.record("a", prompt_tokens=100, cached_tokens=100)
    stats.record("b", prompt_tokens=100, cached_tokens=0)
    snapshot = msgspec.to_builtins(stats.report())
    assert snapshot["models"]["a"]["1m"] == {"prompt_tokens": 400, "cached_tokens": 200, "hit_rate": 0.5}
    assert snapshot["models"]["b"]["1m"] == {"prompt_tokens": 100, "cached_tokens": 0, "hit_rate": 0.0}
    assert snapshot["total"]["since_start"] == {"prompt_tokens": 500, "cached_tokens": 200, "hit_rate": 0.4}


@pytest.mark.parametrize(
    ("age_s", "minute", "quarter"),
    [(0, 10, 10), (59, 10, 10), (60, 0, 10), (899, 0, 10), (900, 0, 0)],
)
def test_windows_end_to_the_second(age_s: int, minute: int, quarter: int) -> None:
    clock = ManualClock(1000.9)
    stats = CacheStats(clock)
    stats.record("m", prompt_tokens=10, cached_tokens=5)
    clock.now += age_s
    total = msgspec.to_builtins(stats.report())["total"]
    assert (total["1m"]["prompt_tokens"], total["15m"]["prompt_tokens"]) == (minute, quarter)
    assert total["since_start"] == {"prompt_tokens": 10, "cached_tokens": 5, "hit_rate": 0.5}


@given(
    st.lists(
        st.tuples(st.floats(0, 400), st.sampled_from("ab"), st.integers(0, 10**6), st.integers(0, 100)), max_size=40
    )
)
def test_equals_the_sum_over_a_plain_list(events: list[tuple[float, str, int, int]]) -> None:
    clock = ManualClock()
    stats = CacheStats(clock)
    told: list[tuple[int, str, int, int]] = []
    for pause_s, model, prompt_tokens, percent in events:
        clock.now += pause_s
        cached_tokens = prompt_tokens * percent // 100
        stats.record(model, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        told.append((int(clock.now), model, prompt_tokens, cached_tokens))
        report = stats.report()
        for window, window_s in (("1m", 60), ("15m", 900), ("since_start", None)):
            recent = [t for t in told if window_s is None or t[0] > int(clock.now) - window_s]
            expected = cache_counts(sum(t[2] for t in recent), sum(t[3] for t in recent))
            assert report.total[window] == expected
            mine = [t for t in recent if t[1] == model]
            expected = cache_counts(sum(t[2] for t in mine), sum(t[3] for t in mine))
            assert report.models[model][window] == expected
