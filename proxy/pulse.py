"""Signs of life of one worker: is it still there, and does it get on with what it has?

beat ──► there                                       none for WORKER_SILENCE_S: silent
     ──► step counter moved, or nothing to do        neither for `patience_s`: stuck
     ──► it counts as many requests as we wait for   fewer for WORKER_SILENCE_S: it has forgotten some

Not by how long a request takes: a long prompt behind others is no fault. A stuck worker still beats, for its step runs
in a thread of its own. What else it sends is no sign of life: only a beat tells what it has in hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prefixcache.limits import (
    MAX_STEP_TOKENS,
    WORKER_DEEP_TOKENS,
    WORKER_SILENCE_S,
    WORKER_STUCK_CHUNKS,
    WORKER_STUCK_LEAST_S,
    WORKER_STUCK_UNKNOWN_S,
    WORKER_SUSPECT_S,
)
from prefixcache.protocol import Beat

SUSPECT_SHARE = 0.5
"""Of the patience with a step, after which a worker gets no further request as long as another one may take it."""


class Pulse:
    """Of one stream; `now` by one clock."""

    def __init__(self, now: float) -> None:
        self._beat_at = self._stepped_at = now
        self._step: int | None = None
        self._num_in_hand = 0
        self._owes_first_tokens = False
        self._forgot_at: float | None = None
        """The first of the beats in a row that knew of too few requests."""

    def connected(self, now: float) -> None:
        """The time counts from here: it may have been long before the worker was reached."""
        self._beat_at = self._stepped_at = now

    def beat(self, beat: Beat, now: float, *, num_ours: int = 0, tells_prefilling: bool = True) -> None:
        """`num_ours`: requests that it must know of; `tells_prefilling`: 0 says that no first token is owed."""
        self._beat_at = now
        self._num_in_hand = beat.running + beat.waiting
        self._owes_first_tokens = bool(beat.prefilling or beat.waiting or not tells_prefilling)
        if beat.step != self._step or not self._num_in_hand:
            self._step, self._stepped_at = beat.step, now
        if self._num_in_hand >= num_ours:
            self._forgot_at = None
        elif self._forgot_at is None:
            self._forgot_at = now

    def patience_s(self, prefill_rate: float | None, depth_tokens: int = 0) -> float:
        """How long a step may take: `prefill_rate` in tokens a second, None where it has not been measured.

        Then a chunk may take long, for all that is known, but a step that only decodes does not. `depth_tokens`: where
        a chunk may stand in its prompt.
        """
        if not prefill_rate:
            return WORKER_STUCK_UNKNOWN_S if self._owes_first_tokens else WORKER_STUCK_LEAST_S
        least_s = max(WORKER_STUCK_LEAST_S, WORKER_STUCK_CHUNKS * MAX_STEP_TOKENS / prefill_rate)
        if not self._owes_first_tokens:
            return least_s
        deep_s = WORKER_STUCK_CHUNKS * MAX_STEP_TOKENS / prefill_rate * (1 + depth_tokens / WORKER_DEEP_TOKENS)
        return max(least_s, min(deep_s, WORKER_STUCK_UNKNOWN_S))

    def is_suspect(self, now: float, *, prefill_rate: float | None) -> bool:
        """Whether it should get no further request; that costs so little that no chunk is taken for a deep one."""
        if now - self._beat_at > WORKER_SUSPECT_S:
            return True
        return bool(self._num_in_hand) and now - self._stepped_at > SUSPECT_SHARE * self.patience_s(prefill_rate)

    def is_silent(self, now: float) -> bool:
        return now - self._beat_at > WORKER_SILENCE_S

    def is_stuck(self, now: float, *, prefill_rate: float | None, depth_tokens: int) -> bool:
        """`depth_tokens`: the longest context it takes."""
        return bool(self._num_in_hand) and self.stood_still_s(now) > self.patience_s(prefill_rate, depth_tokens)

    def is_forgetful(self, now: float) -> bool:
        return self._forgot_at is not None and now - self._forgot_at > WORKER_SILENCE_S

    def stood_still_s(self, now: float) -> float:
        """Time without a step."""
        return now - self._stepped_at


async def until_hung(what: Callable[[float], str | None]) -> str:
    """Returns what is wrong as soon as `what`, asked with the time of the loop, says so.

    Time during which our own loop was late does not count: it may have frames to read.
    """
    loop = asyncio.get_running_loop()
    pause_s = WORKER_SILENCE_S / 10
    while True:
        before = loop.time()
        await asyncio.sleep(pause_s)
        now = loop.time()
        if now - before <= 2 * pause_s and (wrong := what(now)) is not None:
            return wrong
