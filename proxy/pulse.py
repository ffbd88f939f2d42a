"""Signs of life of one worker: is it still there, and does it get on with what it has?

frame  ──► heard                                  nothing for WORKER_SILENCE_S: silent
beat   ──► step counter moved, or nothing to do   neither for `patience_s`: stuck

Not by how long a request takes: a long prompt behind others is no fault. A stuck worker still beats, for its step runs
in a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prefixcache.limits import (
    MAX_STEP_TOKENS,
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
        self._stepped_at = now
        self._step: int | None = None
        self._num_in_hand = 0
        self._owes_first_tokens = False

    def beat(self, beat: Beat, now: float) -> None:
        self._num_in_hand = beat.running + beat.waiting
        self._owes_first_tokens = bool(beat.prefilling or beat.waiting)
        if beat.step != self._step or not self._num_in_hand:
            self._step, self._stepped_at = beat.step, now

    def patience_s(self, prefill_rate: float | None) -> float:
        """How long a step may take: `prefill_rate` in tokens a second, None where it has not been measured.

        Then a chunk may take long, for all that is known, but a step that only decodes does not.
        """
        if prefill_rate:
            return max(WORKER_STUCK_LEAST_S, WORKER_STUCK_CHUNKS * MAX_STEP_TOKENS / prefill_rate)
        return WORKER_STUCK_UNKNOWN_S if self._owes_first_tokens else WORKER_STUCK_LEAST_S

    def is_suspect(self, now: float, *, heard_at: float, prefill_rate: float | None) -> bool:
        """Whether it should get no further request; `heard_at`: when its last frame came."""
        if now - heard_at > WORKER_SUSPECT_S:
            return True
        return bool(self._num_in_hand) and now - self._stepped_at > SUSPECT_SHARE * self.patience_s(prefill_rate)

    def is_silent(self, now: float, *, heard_at: float) -> bool:
        return now - heard_at > WORKER_SILENCE_S

    def is_stuck(self, now: float, *, prefill_rate: float | None) -> bool:
        return bool(self._num_in_hand) and now - self._stepped_at > self.patience_s(prefill_rate)

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
