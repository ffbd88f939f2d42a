"""Sizes of a simulated fleet that nobody has given: caches and prefill rates to compare policies with.

Caches hold a share of the trace's unique blocks, all together. Rates are such that the bound, one pooled cache, is busy
so much of the time: what a policy computes twice then shows as waiting.
"""

from __future__ import annotations

from prefixcache.simulation.lru import LruCache
from prefixcache.simulation.trace import Trace

USUAL_LOAD = 0.75
CLOSED_LOOP_RATE = 7.9
"""Tokens a second of all workers together for each request of a trace with sessions. Those wait for their answers, so
that a share of busy time says little: a load of USUAL_LOAD means this rate, the half of it twice this rate."""
LEAST_BLOCKS = 2


def capacity_blocks(trace: Trace, share: float, num_workers: int) -> int:
    """Of each worker's cache."""
    return max(LEAST_BLOCKS, int(trace.num_unique_blocks * share / num_workers))


def prefill_rate(trace: Trace, num_workers: int, capacity_blocks: int, load: float) -> float:
    """Tokens a second of each worker, at which the bound is busy `load` of the time."""
    if trace.is_closed_loop:
        return CLOSED_LOOP_RATE * len(trace.requests) / num_workers * USUAL_LOAD / load
    uncached = trace.prompt_tokens - _pooled_hit_tokens(trace, num_workers * capacity_blocks)
    return uncached / (max(trace.duration_s, 1.0) * num_workers * load)


def _pooled_hit_tokens(trace: Trace, capacity_blocks: int) -> int:
    """Of one cache that takes the requests in their order, each in no time."""
    cache = LruCache(capacity_blocks)
    hits = 0
    for request in trace.requests:
        hits += cache.depth(request.blocks, request.reusable_blocks)
        held = request.blocks[:capacity_blocks]
        cache.hold(held)
        cache.release(held, request.arrival_s)
    return hits * trace.block_tokens
