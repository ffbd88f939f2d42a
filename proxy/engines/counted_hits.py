"""Predictions whose outcome the answers do not tell, judged together by the engine's own count of cached tokens.

    predicted   |  2k |   6k    | 4k ..      until WINDOW_TOKENS are predicted
    counter     |--------- hits of all its clients ---------|      below: fewer than predicted

Others' requests are in the count, too, so that it may hide what was not there, and never invents it. A stock vLLM tells
no cached tokens with its answers.
"""

from __future__ import annotations

WINDOW_TOKENS = 65_536
"""Predicted ones. A hit is counted when its request begins, a prediction when it ends: what is on its way is little."""
TOLERANCE = 1 / 8


class CountedHits:
    """Of one engine."""

    def __init__(self) -> None:
        self._since: float | None = None
        """The count when the window began."""
        self._predicted_tokens = 0

    def predict(self, tokens: int) -> None:
        """One prediction that ended untold."""
        self._predicted_tokens += tokens

    def take(self, counted_tokens: float | None) -> bool | None:
        """Whether a window that is full was below what was predicted; None for none. A count that fell begins anew."""
        if counted_tokens is None or self._since is None or counted_tokens < self._since:
            self._since, self._predicted_tokens = counted_tokens, 0
            return None
        if self._predicted_tokens < WINDOW_TOKENS:
            return None
        is_below = counted_tokens - self._since < self._predicted_tokens * (1 - TOLERANCE)
        self._since, self._predicted_tokens = counted_tokens, 0
        return is_below
