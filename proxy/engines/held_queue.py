"""The requests that this proxy keeps back for one engine, which would begin them in the order of their arrival.

    joined ──► waiting ──least u - AGEING * waited first──► in hand ──first byte of the answer──► prefilled
                  │                                         └──or its estimate is well over──────┘
                  └── cancelled, or turned away because the engine is down

u: its prefill in seconds. At most one prefill is in hand; several only where all of them together are so short that an
engine computes them in one step. Who waits gains on all others alike, so that the order of two requests never changes:
u + AGEING * (time of joining) is a fixed key, and the queue a heap.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable
from types import TracebackType

from prefixcache.errors import Overloaded, Unavailable
from prefixcache.limits import (
    HELD_BATCH_S,
    HELD_OVERRUN,
    HELD_OVERRUN_S,
    HELD_STREAM_S,
    MAX_HELD_REQUESTS,
    RETRY_AFTER_MOST_S,
    RETRY_AFTER_S,
)
from prefixcache.routing.order import AGEING

STREAM_OVERRUN = 10.0


def order_key(prefill_s: float, joined_at: float) -> float:
    """`routing.order` by mean, as a key that stays as it is while all wait; the least goes first."""
    return prefill_s + AGEING * joined_at


class Turn:
    """One request's place in the queue; its scope owns it, and each call may come twice."""

    __slots__ = ("_come", "_expiry", "_is_over", "_queue", "is_stream", "joined_at", "prefill_s")

    def __init__(self, queue: HeldQueue, *, prefill_s: float, is_stream: bool, joined_at: float) -> None:
        self._queue = queue
        self._come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expiry: asyncio.TimerHandle | None = None
        self._is_over = False
        self.prefill_s = prefill_s
        self.is_stream = is_stream
        self.joined_at = joined_at

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.prefilled()

    async def come(self) -> None:
        """Returns when the request may be sent. Raises what the queue was turned away with."""
        await self._come

    def prefilled(self) -> None:
        """The first byte of its answer came, or it is not wanted any more."""
        if self._is_over:
            return
        self._is_over = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._queue._leave(self)
        self._come.cancel()

    @property
    def most_in_hand_s(self) -> float:
        if self.is_stream:
            return max(STREAM_OVERRUN * self.prefill_s, HELD_STREAM_S)
        return HELD_OVERRUN * self.prefill_s + HELD_OVERRUN_S


class HeldQueue:
    """Of one engine and one process."""

    def __init__(self, *, most_held: int = MAX_HELD_REQUESTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_held = most_held
        self._clock = clock
        self._heap: list[tuple[float, int, Turn]] = []
        """Those waiting, and some that have left."""
        self._waiting: set[Turn] = set()
        self._in_hand: set[Turn] = set()
        self._in_hand_us = 0
        """Their prefills; whole microseconds, so that what was added is taken away exactly."""
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_hand(self) -> int:
        return len(self._in_hand)

    @property
    def ahead_s(self) -> float:
        """Seconds of prefill of all that is in it."""
        return sum(turn.prefill_s for turn in (*self._waiting, *self._in_hand))

    def join(self, prefill_s: float, *, is_stream: bool) -> Turn:
        """Raises Overloaded if too many wait already."""
        if len(self._waiting) >= self._most_held:
            again_s = min(max(math.ceil(self.ahead_s), RETRY_AFTER_S), RETRY_AFTER_MOST_S)
            raise Overloaded(
                f"{len(self._waiting)} requests wait for this engine already, try again in {again_s} s",
                retry_after_s=again_s,
            )
        turn = Turn(self, prefill_s=prefill_s, is_stream=is_stream, joined_at=self._clock())
        self._waiting.add(turn)
        heapq.heappush(self._heap, (order_key(prefill_s, turn.joined_at), next(self._numbers), turn))
        self._send_on()
        return turn

    def turn_away(self, error: Unavailable) -> None:
        """Ends all waiting with `error`; what is in hand learns by itself what became of it."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self._heap.clear()
        for turn in waiting:
            if not turn._come.done():
                turn._come.set_exception(error)

    def _leave(self, turn: Turn) -> None:
        self._waiting.discard(turn)
        if turn in self._in_hand:
            self._in_hand.remove(turn)
            self._in_hand_us -= _micros(turn)
        self._send_on()

    def _send_on(self) -> None:
        """Lets those go whose turn it is."""
        while self._heap:
            turn = self._heap[0][2]
            is_gone = turn not in self._waiting or turn._come.done()
            if not is_gone and self._in_hand and self._in_hand_us + _micros(turn) > HELD_BATCH_S * 1e6:
                return
            heapq.heappop(self._heap)
            if is_gone:
                continue
            self._waiting.remove(turn)
            self._in_hand.add(turn)
            self._in_hand_us += _micros(turn)
            turn._expiry = asyncio.get_running_loop().call_later(turn.most_in_hand_s, turn.prefilled)
            turn._come.set_result(None)


def _micros(turn: Turn) -> int:
    return round(turn.prefill_s * 1e6)
