"""Prompt tokens that this process placed on each worker of late: how much of the fleet's work it does.

Late is measured in tokens placed on all of them, not in seconds: what a cache holds is as old as it takes to fill it.
"""

from __future__ import annotations

import math


class RecentTokens:
    """Of the workers of one namespace."""

    def __init__(self) -> None:
        self._efolds = 0.0
        """By which all that was placed at first has faded."""
        self._placed: dict[str, tuple[float, float]] = {}
        """By worker id: tokens, and the e-folds up to which they have faded."""

    def place(self, worker_id: str, tokens: int, *, forgotten_tokens: float) -> None:
        """What was placed before fades e-fold over `forgotten_tokens`, a positive number."""
        self._efolds += tokens / forgotten_tokens
        self._placed[worker_id] = (self.of(worker_id) + tokens, self._efolds)

    def of(self, worker_id: str) -> float:
        tokens, efolds = self._placed.get(worker_id, (0.0, 0.0))
        return tokens * math.exp(efolds - self._efolds)
