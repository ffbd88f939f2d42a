"""The random number behind output token `index` of choice `choice`: it depends on (seed, choice, index) alone."""

from __future__ import annotations

import struct

import xxhash


def uniform(seed: int, choice: int, index: int) -> float:
    """In [0, 1): the leading 53 bits of xxh3_64 over the three numbers as u64 little-endian."""
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed, choice, index))
    return (digest >> 11) * 2.0**-53
