"""How much the benchmark does: enough for the floors, or a smoke that only shows that it still runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    shape_scale: float
    """Share of the full tree shapes that is stored."""
    repeats: int
    """Interleaved repeats of everything that is timed."""
    match_calls: int
    """Of one case in one repeat."""
    match_blocks: tuple[int, ...]
    apply_calls: int
    """Batches in which one index grows from empty."""
    ticks: int
    """Turns of the loop, 16 calls each, in one repeat."""
    lookup_s: float
    proxies: tuple[int, ...]
    growth: tuple[int, ...]
    """Index blocks at which the cost of a call is looked at, ascending."""
    dead_claims: int


FULL = Sizes(
    shape_scale=1.0,
    repeats=7,
    match_calls=100,
    match_blocks=(128, 2_048, 8_192),
    apply_calls=300,
    ticks=50,
    lookup_s=4.0,
    proxies=(1, 2, 4),
    growth=(10_000, 100_000, 1_000_000, 10_000_000),
    dead_claims=1_000_000,
)
QUICK = Sizes(
    shape_scale=0.01,
    repeats=2,
    match_calls=10,
    match_blocks=(128, 512),
    apply_calls=30,
    ticks=5,
    lookup_s=0.2,
    proxies=(1, 2),
    growth=(4_000, 40_000),
    dead_claims=20_000,
)
