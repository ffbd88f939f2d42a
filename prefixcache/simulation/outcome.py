"""What came out of a run, or the mean of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from prefixcache.simulation.fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times to the first token, and what was done for them."""

    hit_rate: float
    """Cached tokens per prompt token."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_max_s: float
    imbalance: float
    """Tokens computed by each minute's busiest worker, times workers, over those of all."""
    utilisation: float
    """Share of the time in which workers prefill."""
    steals: float
    """Requests that an idle worker was given."""
    slices: float
    """Pieces of prefills that were not their last."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values, linear between two of them."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def outcome(fleet: Fleet) -> Outcome:
    """Of a fleet that has run."""
    ttfts = sorted(job.ttft_s for job in fleet.first_tokens if job.ttft_s is not None)
    prompt_tokens = sum(job.request.prompt_tokens for job in fleet.first_tokens)
    minutes = {minute for worker in fleet.workers for minute in worker.work_by_minute}
    most = sum(max(worker.work_by_minute[minute] for worker in fleet.workers) for minute in minutes)
    computed = sum(worker.work_by_minute.total() for worker in fleet.workers)
    return Outcome(
        hit_rate=sum(worker.cached_tokens for worker in fleet.workers) / prompt_tokens,
        ttft_mean_s=fmean(ttfts),
        ttft_p50_s=percentile(ttfts, 0.50),
        ttft_p90_s=percentile(ttfts, 0.90),
        ttft_p99_s=percentile(ttfts, 0.99),
        ttft_max_s=ttfts[-1],
        imbalance=most * len(fleet.workers) / computed,
        utilisation=sum(worker.engine.busy_s for worker in fleet.workers) / len(fleet.workers) / fleet.ended_at,
        steals=fleet.num_steals,
        slices=sum(worker.num_slices for worker in fleet.workers),
    )
