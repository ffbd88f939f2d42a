"""What prefill chunks may still take of a step: tokens, and where decodes wait for it, milliseconds.

    step       | 1 | 1 | 1 |   chunk   | chunk |                at most MAX_STEP_TOKENS tokens
                 decodes     ◄── at most `step_s` beside decodes ──►

A chunk deep in a long prompt attends to all before it, so that as many tokens take several times as long. The first
chunk of a step is always as long as a block: a prefill goes on however long that takes.
"""

from __future__ import annotations

import math

from worker.step_costs import ChunkCost, pairs

_ROUNDING = 1e-9


class StepBudget:
    """Of one step."""

    def __init__(self, *, num_tokens: int, least_tokens: int, cost: ChunkCost, seconds: float) -> None:
        """`least_tokens` for the first chunk, whatever it costs; `seconds` infinite where nobody waits."""
        self._num_tokens = num_tokens
        self._least_tokens = least_tokens
        self._cost = cost
        self._left_s = seconds
        self._is_untouched = True

    @property
    def is_spent(self) -> bool:
        return self.num_tokens_from(0) <= 0

    def num_tokens_from(self, start: int) -> int:
        """Tokens of the longest chunk that begins behind `start` tokens."""
        if self._left_s == math.inf:
            return self._num_tokens
        fitting = self._cost.num_tokens(start, max(self._left_s, 0.0)) + _ROUNDING
        num_tokens = self._num_tokens if fitting >= self._num_tokens else int(fitting)
        return min(max(num_tokens, self._least_tokens), self._num_tokens) if self._is_untouched else num_tokens

    def take(self, start: int, num_tokens: int) -> None:
        """A chunk of these tokens behind `start` others is part of the step."""
        self._num_tokens -= num_tokens
        self._left_s -= self._cost.seconds(num_tokens, pairs(start, num_tokens))
        self._is_untouched = False
