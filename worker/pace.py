"""How fast the engine computes, learnt from its own steps.

A step of T prefill tokens takes about c + T / R seconds. R is wanted for long prefills, that is for full chunks, so it
is fitted by least squares through the origin: R = sum(w T T) / sum(w T s). A step then counts by the square of its
tokens, and 16-token tails, whose time is nearly all c, do not drown the chunks of 512. What decodes in the same steps
cost is part of R: a prefill waits for them, too.

Weights fall by tokens, not by steps, for the same reason: e-fold over FORGOTTEN_TOKENS of prefill.
"""

from __future__ import annotations

import math

FORGOTTEN_TOKENS = 16_384
"""32 full chunks: long enough to even out the noise of single steps, short enough to follow a neighbour's load."""
FORGOTTEN_DECODE_STEPS = 16
"""Weight of a decode step among those before it is 1 / this."""


class Pace:
    """Means over the latest steps. Belongs to the step thread."""

    def __init__(self) -> None:
        self._tokens_squared = 0.0
        self._token_seconds = 0.0
        self._inter_token_latency_s: float | None = None

    @property
    def prefill_rate(self) -> float:
        """Prefill tokens a second; 0 while none was measured."""
        return self._tokens_squared / self._token_seconds if self._token_seconds else 0.0

    @property
    def inter_token_latency_s(self) -> float:
        """Of steps with decodes, prefill chunks beside them included; 0 while there were none."""
        return self._inter_token_latency_s or 0.0

    def observe(self, *, prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step has ended that did not fail as a whole."""
        if prefill_tokens:
            kept = math.exp(-prefill_tokens / FORGOTTEN_TOKENS)
            self._tokens_squared = self._tokens_squared * kept + prefill_tokens * prefill_tokens
            self._token_seconds = self._token_seconds * kept + prefill_tokens * seconds
        if num_decodes:
            before = self._inter_token_latency_s
            change = 0.0 if before is None else (seconds - before) / FORGOTTEN_DECODE_STEPS
            self._inter_token_latency_s = seconds if before is None else before + change
