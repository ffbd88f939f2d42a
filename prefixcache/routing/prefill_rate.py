"""How fast prompts are prefilled, learnt from prefills of known length and time.

A prefill of T tokens takes about c + T / R seconds. R is wanted for long ones, so it is fitted by least squares
through the origin: R = sum(w T T) / sum(w T s). A prefill then counts by the square of its tokens, and short ones,
whose time is nearly all c, do not drown the long ones.

Weights fall by tokens, not by prefills, for the same reason: e-fold over `forgotten_tokens`.
"""

from __future__ import annotations

import math


class PrefillRate:
    """A mean over the latest prefills."""

    def __init__(self, *, forgotten_tokens: float) -> None:
        self._forgotten_tokens = forgotten_tokens
        self._tokens_squared = 0.0
        self._token_seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None while none was measured that took any time."""
        return self._tokens_squared / self._token_seconds if self._token_seconds else None

    def observe(self, *, tokens: int, seconds: float) -> None:
        """A prefill of `tokens`, none of them from a cache, took `seconds`; one of no tokens tells nothing."""
        kept = math.exp(-tokens / self._forgotten_tokens)
        self._tokens_squared = self._tokens_squared * kept + tokens * tokens
        self._token_seconds = self._token_seconds * kept + tokens * seconds
