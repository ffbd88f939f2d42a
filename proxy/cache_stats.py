"""Prompt and cached tokens over sliding windows: what GET /cache/stats answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

WINDOWS_S: Mapping[str, int] = {"1m": 60, "15m": 900}
_LONGEST_S = max(WINDOWS_S.values())


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of completed requests; `hit_rate` = cached / prompt, null without prompt tokens."""

    prompt_tokens: int
    cached_tokens: int
    hit_rate: float | None


def cache_counts(prompt_tokens: int, cached_tokens: int) -> CacheCounts:
    hit_rate = cached_tokens / prompt_tokens if prompt_tokens else None
    return CacheCounts(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, hit_rate=hit_rate)


@dataclass(slots=True)
class _Bucket:
    """One second of the clock."""

    second: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


class _History:
    """Counts of one model: a bucket for each second of the longest window in which something ended, and the sum."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def record(self, second: int, prompt_tokens: int, cached_tokens: int) -> None:
        buckets = self._buckets
        if not buckets or buckets[-1].second < second:
            buckets.append(_Bucket(second))
        buckets[-1].prompt_tokens += prompt_tokens
        buckets[-1].cached_tokens += cached_tokens
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens
        while buckets[0].second <= second - _LONGEST_S:
            buckets.popleft()

    def totals(self, second: int) -> dict[str, tuple[int, int]]:
        """(prompt, cached) tokens of each window that ends with the current second, and since start."""
        totals: dict[str, tuple[int, int]] = {}
        for name, window_s in WINDOWS_S.items():
            recent = [bucket for bucket in self._buckets if bucket.second > second - window_s]
            totals[name] = (
                sum(bucket.prompt_tokens for bucket in recent),
                sum(bucket.cached_tokens for bucket in recent),
            )
        totals["since_start"] = (self._prompt_tokens, self._cached_tokens)
        return totals


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by window ("1m", "15m", "since_start"), over all models and for each."""

    total: dict[str, CacheCounts]
    models: dict[str, dict[str, CacheCounts]]


class CacheStats:
    """Exact sums in whole-second buckets of a monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._histories: dict[str, _History] = {}

    def record(self, model: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        history = self._histories.setdefault(model, _History())
        history.record(int(self._clock()), prompt_tokens, cached_tokens)

    def report(self) -> CacheReport:
        second = int(self._clock())
        by_model = {model: history.totals(second) for model, history in self._histories.items()}
        total = {
            window: cache_counts(
                sum(totals[window][0] for totals in by_model.values()),
                sum(totals[window][1] for totals in by_model.values()),
            )
            for window in (*WINDOWS_S, "since_start")
        }
        models = {
            model: {window: cache_counts(*counts) for window, counts in totals.items()}
            for model, totals in by_model.items()
        }
        return CacheReport(total=total, models=models)
