"""One connection to Redis on which calls wait for each other as little as can be: no task and no timer a call.

    send send send │ end of the loop's turn: one write          time ──►
    ┌─────────────────────────── in order ────────────────────────────┐
    │ overdue: owe a reply,      │ waiting: sent,      │ unsent        │
    │ nobody waits for it        │ not yet overdue     │               │
    └────────────────────────────┴─────────────────────┴───────────────┘
      ▲ each reply is the oldest's: one that comes late is dropped, the next call gets its own

A call expires `deadline_s` after its write. It is never taken out of the queue, also not when its caller was cancelled:
its place waits for its reply, so that nobody gets another's. A connection that owes one for INDEX_DEAD_CONNECTION_S is
cut. Before anything expires, what waits in the socket is read: the loop may have been late, not Redis.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import hiredis

from prefixcache.errors import IndexUnavailable
from prefixcache.index import redis_errors
from prefixcache.index.breaker import Breaker
from prefixcache.index.redis_client import Argument
from prefixcache.limits import INDEX_CONNECT_TIMEOUT_S, INDEX_DEAD_CONNECTION_S, INDEX_MOST_CALLS

_LATE_LOOP_TURNS = 2
"""Turns of the loop, asyncio's or uvloop's, in which it has asked every socket once."""


class Receiver(Protocol):
    """Who waits for a reply; a Future is one."""

    def done(self) -> bool: ...

    def set_result(self, reply: Any, /) -> None:
        """An error reply comes as the hiredis.ReplyError that it was read as."""

    def set_exception(self, error: IndexUnavailable, /) -> None: ...


class HotConnection(asyncio.Protocol):
    """`lost` has the reason as its result once the connection is gone; every call has failed by then."""

    def __init__(self, place: str, *, changed: Callable[[], None]) -> None:
        """`changed` is called after replies became overdue or came late."""
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[IndexUnavailable] = self._loop.create_future()
        self._place = place
        self._changed = changed
        self._breaker = Breaker()
        self._deadline_s = INDEX_CONNECT_TIMEOUT_S
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._reason: IndexUnavailable | None = None
        self._overdue: deque[float] = deque()
        """When each was written."""
        self._waiting: deque[tuple[Receiver, float]] = deque()
        """With the time of its write."""
        self._unsent: list[Receiver] = []
        self._words: list[bytes] = []
        self._timer: asyncio.Handle | None = None
        self._rings_at = math.inf
        """When the timer does, or did while what is due then is under way; infinite if it is not set."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def serve(self, breaker: Breaker, deadline_s: float) -> None:
        """From now on, with the handshake's last reply read, calls have this deadline and count for this breaker."""
        assert not self._waiting and not self._unsent and not self._overdue
        self._breaker, self._deadline_s = breaker, deadline_s

    def send(self, receiver: Receiver, *words: Argument) -> None:
        """Queues one command for the write that ends this turn of the loop. Raises IndexUnavailable, nothing queued."""
        if not self.is_open:
            raise IndexUnavailable(str(self._reason or redis_errors.closed(self._place)))
        if len(self._overdue) + len(self._waiting) + len(self._unsent) >= INDEX_MOST_CALLS:
            raise IndexUnavailable(f"{INDEX_MOST_CALLS} calls to Redis at {self._place} wait for their replies")
        self._words.append(hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub takes tuples of one
        self._unsent.append(receiver)
        if len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def abort(self, reason: IndexUnavailable) -> None:
        """Drops the connection: no reply is read any more."""
        if self._reason is None:
            self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    # --- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class.

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self.abort(redis_errors.failed(self._place, f"it does not speak Redis' protocol: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._reason or redis_errors.failed(self._place, error or "it closed the connection")
        self._reason = reason
        if self._timer is not None:
            self._timer.cancel()
        receivers = [receiver for receiver, _ in self._waiting] + self._unsent
        self._overdue.clear()
        self._waiting.clear()
        self._unsent.clear()
        self._words.clear()
        self._breaker.lost()
        if not self.lost.done():
            self.lost.set_result(reason)
        for receiver in receivers:
            if not receiver.done():
                receiver.set_exception(IndexUnavailable(str(reason)))

    def _take(self, reply: Any) -> None:
        if self._overdue:
            self._overdue.popleft()
            self._breaker.paid()
            self._changed()
        elif self._waiting:
            receiver, _ = self._waiting.popleft()
            self._breaker.answered()
            if not receiver.done():
                receiver.set_result(reply)
        elif isinstance(reply, hiredis.ReplyError):  # How a server with too many clients turns one away.
            self.abort(redis_errors.refused(self._place, str(reply)))
        else:
            self.abort(redis_errors.failed(self._place, "it sent a reply that nothing asked for"))

    def _flush(self) -> None:
        if self._transport is None or not self._unsent:  # Lost since.
            return
        written_at = time.monotonic()
        self._waiting.extend([(receiver, written_at) for receiver in self._unsent])
        words = b"".join(self._words)
        self._unsent.clear()
        self._words.clear()
        self._transport.write(words)
        self._watch()

    # --- deadlines: one timer, for the oldest that is still looked after

    def _next_due(self) -> float | None:
        due: float | None = None
        if self._waiting:
            due = self._waiting[0][1] + self._deadline_s
        if self._overdue:
            dead_at = self._overdue[0] + INDEX_DEAD_CONNECTION_S
            due = dead_at if due is None else min(due, dead_at)
        return due

    def _watch(self) -> None:
        """Sees to it that the timer rings for what is due next, or before."""
        due = self._next_due()
        if due is None or due >= self._rings_at or self.lost.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = due
        self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._ring)

    def _ring(self) -> None:
        now = time.monotonic()
        due = self._next_due()
        if due is not None and due <= now:
            self._give_turns(_LATE_LOOP_TURNS, now)
        else:
            self._rings_at = math.inf
            self._watch()

    def _give_turns(self, num_turns: int, now: float) -> None:
        if num_turns:
            self._timer = self._loop.call_soon(self._give_turns, num_turns - 1, now)
        else:
            self._expire(now)
            self._rings_at = math.inf
            self._watch()

    def _expire(self, now: float) -> None:
        """Ends what was due at `now`, before the loop had its turns."""
        waiting, overdue = self._waiting, self._overdue
        num_before = len(overdue)
        while waiting and waiting[0][1] + self._deadline_s <= now:
            receiver, written_at = waiting.popleft()
            overdue.append(written_at)
            self._breaker.expired()
            if not receiver.done():
                receiver.set_exception(redis_errors.no_answer(self._place, self._deadline_s))
        if overdue and overdue[0] + INDEX_DEAD_CONNECTION_S <= now:
            self.abort(redis_errors.no_answer(self._place, now - overdue[0]))
        if len(overdue) > num_before:
            self._changed()
