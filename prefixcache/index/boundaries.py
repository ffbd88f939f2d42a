"""Boundaries: the depths of a chain on which pending claims stand, all up to 8, two an octave and the last one.

    depth   1 2 3 4 5 6 7 8 9 10 11 12 .. 16 .. 24 .. 32 .. 48 ...  n
            ^ ^ ^ ^ ^ ^ ^ ^          ^     ^     ^     ^     ^      ^

A request that shares a prefix of d index blocks with one that is placed already meets it on the deepest boundary up to
d: it is predicted two thirds of d at least, and all of an equal prompt. A short system prompt is met whole: of 5 blocks
shared, 4 predicted, an idle engine looked nearer than the one that was about to have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from prefixcache.limits import MAX_MATCH_BLOCKS

DENSE_DEPTHS = 8
"""Up to here each depth is a boundary."""


@lru_cache(maxsize=1_024)
def boundary_depths(num_blocks: int) -> tuple[int, ...]:
    """Ascending, counted from 1; empty for a chain without blocks."""
    depths = list(range(1, min(num_blocks, DENSE_DEPTHS) + 1))
    octave = DENSE_DEPTHS
    while octave <= num_blocks:
        depths += [depth for depth in (octave * 3 // 2, octave * 2) if depth <= num_blocks]
        octave *= 2
    if num_blocks and depths[-1] != num_blocks:
        depths.append(num_blocks)
    return tuple(depths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """The boundary blocks of one chain."""

    depths: tuple[int, ...]
    hashes: tuple[int, ...]

    @classmethod
    def of(cls, chain: Sequence[int]) -> Boundaries:
        """Those of the blocks that a match looks at."""
        depths = boundary_depths(min(len(chain), MAX_MATCH_BLOCKS))
        return cls(depths=depths, hashes=tuple(chain[depth - 1] for depth in depths))
