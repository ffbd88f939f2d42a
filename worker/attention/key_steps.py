"""How many keys attention is computed with: few different numbers, so that few kernels are compiled and kept."""

from __future__ import annotations

KEY_STEP = 64
"""Keys come in multiples of it: each lane of softmax's sum has the same keys in every step."""
_LENGTHS = 8
"""Numbers of keys between two powers of two: each takes two kernels, to compile (0.7 ms) and to keep (0.6 MB)."""


def padded_keys(num_keys: int) -> int:
    """The next larger number of keys that is computed with: at most an eighth more, past 512."""
    return round_up(num_keys, max(KEY_STEP, (1 << num_keys.bit_length() - 1) // _LENGTHS))


def round_up(count: int, step: int) -> int:
    return -(-count // step) * step
