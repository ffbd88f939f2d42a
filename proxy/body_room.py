"""Room for the bodies that this process holds: so many bytes together, and what does not fit waits for its turn.

    waiting, in the order of coming ──room──► in hand ──given back──► the next ones that fit
       ├── no room in time, or too many wait: 429
       └── cancelled: the client left

Who waits is not read meanwhile: the kernel's buffers and the client hold what there is of it.
"""

from __future__ import annotations

import asyncio
from collections import deque

from prefixcache.errors import Overloaded, Unavailable
from prefixcache.limits import AWAY_RETRY_AFTER_S, BODY_ROOM_S, MAX_HELD_REQUESTS


class BodyRoom:
    """Of bodies that wait for each other and for no others; none is larger than the whole of it."""

    def __init__(
        self, most_bytes: int, *, most_waiting: int = MAX_HELD_REQUESTS, patience_s: float = BODY_ROOM_S
    ) -> None:
        self._most_bytes = most_bytes
        self._most_waiting = most_waiting
        self._patience_s = patience_s
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._closed: Unavailable | None = None
        self.num_bytes = 0
        """Of those in hand."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, num_bytes: int) -> None:
        """Returns when there is room for a body. Raises Overloaded, and after `turn_away` its error."""
        if self._closed is not None:
            raise self._closed
        if not self._waiting and self.num_bytes + num_bytes <= self._most_bytes:
            self.num_bytes += num_bytes
            return
        if len(self._waiting) >= self._most_waiting:
            raise self._full()
        loop = asyncio.get_running_loop()
        come: asyncio.Future[None] = loop.create_future()
        place = (come, num_bytes)
        self._waiting.append(place)
        expiry = loop.call_later(self._patience_s, self._expire, come)
        try:
            await come
        except BaseException:
            if place in self._waiting:
                self._waiting.remove(place)
                self._let_in()
            elif not come.cancelled() and come.exception() is None:  # Cancelled when it had been let in.
                self.give_back(num_bytes)
            raise
        finally:
            expiry.cancel()

    def give_back(self, num_bytes: int) -> None:
        """All, or a part, of what was taken."""
        self.num_bytes -= num_bytes
        assert self.num_bytes >= 0, "what is given back was taken"
        self._let_in()

    def turn_away(self, error: Unavailable) -> None:
        """Ends all that wait, and whoever comes from now on, with `error`: the proxy shuts down."""
        self._closed = error
        for come, _ in self._waiting:
            if not come.done():
                come.set_exception(error)

    def _let_in(self) -> None:
        while self._waiting:
            come, num_bytes = self._waiting[0]
            if not come.done():
                if self.num_bytes + num_bytes > self._most_bytes:
                    return
                self.num_bytes += num_bytes
                come.set_result(None)
            self._waiting.popleft()

    def _expire(self, come: asyncio.Future[None]) -> None:
        if not come.done():
            come.set_exception(self._full())

    def _full(self) -> Overloaded:
        return Overloaded(
            f"the proxy holds large bodies of {self.num_bytes >> 20} MiB already, try again in {AWAY_RETRY_AFTER_S} s",
            retry_after_s=AWAY_RETRY_AFTER_S,
        )
