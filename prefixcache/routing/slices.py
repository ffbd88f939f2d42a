"""Slices: a long prefill makes room for shorter ones after every few seconds, and what it has computed stays cached.

    long    ████ slice ████|                                                   |████ slice ████|           |██ rest ██
    shorter                |████ slice ████|              |████ slice ████|███ |
    short                                  |██ ██████ ████|                                    |████ ██████|
                           └ the order decides once more: whatever may pass, or the rest of one that was cut

What passes a prefill that was cut is a slice and a half at most, or half of what that one still needs. So few prefills
stand cut at a time, each with at most half of the one before it to go, and passing costs it little more than it takes.

What was computed stays cached like anything else, and nothing is promised: blocks kept for a prefill that stands cut
are missing where there is little room, and by simulation the mean of a full fleet is then higher by a third. Without
guards a small cache livelocks: two long prefills in turn evict each other's blocks. So a prompt that does not fit the
cache is not sliced, nor one that had to compute half of it once more; and a sliced one stays where it is.
"""

from __future__ import annotations

from prefixcache.limits import DEFAULT_PREFILL_RATE

SLICE_S = 1.5
"""Prefill seconds of a slice; by simulation 2 has means alike, and a median of chats that is higher by a tenth."""
LEAST_SLICE_TOKENS = 1024
"""Of a slow worker's slice: a choice costs the rest of a batch."""
PASSING = 1.5
"""Slices that a prefill may have without being cut, and pass whatever was cut; by simulation 1 is alike."""
HALVING = 0.5
"""Of what the shortest sliced prefill still needs: so long a one may pass it; by simulation 0.25 gains half as much,
and more raises 99th percentiles."""
MOST_COMPUTED = 1.5
"""Prompts' worth of tokens computed after which a prefill is not cut any more; by simulation."""


def slice_tokens(prefill_rate: float | None) -> int:
    """Uncached tokens of a slice at so many tokens a second; None is a rate that was not measured yet."""
    return max(LEAST_SLICE_TOKENS, int(SLICE_S * (prefill_rate or DEFAULT_PREFILL_RATE)))


def may_pass(uncached_tokens: int, slice_tokens: int, left_tokens: int | None) -> bool:
    """Whether a prefill may begin beside sliced ones.

    `left_tokens`: the least of what these still need, None without any.
    """
    return left_tokens is None or uncached_tokens <= max(PASSING * slice_tokens, HALVING * left_tokens)


def is_to_be_sliced(
    uncached_tokens: int, slice_tokens: int, prompt_tokens: int, capacity_tokens: float, computed_tokens: int
) -> bool:
    """Whether a prefill that begins or goes on is to stop after its next slice.

    `computed_tokens`: what was computed for it so far, all slices together; `capacity_tokens`: of the cache, empty.
    """
    return (
        uncached_tokens > PASSING * slice_tokens
        and prompt_tokens <= capacity_tokens
        and computed_tokens < MOST_COMPUTED * prompt_tokens
    )
