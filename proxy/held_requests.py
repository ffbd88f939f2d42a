"""The held queue of requests for own workers: of a model that is known while none of its workers takes any.

no worker ──► waiting, in the order of their coming ──a worker is there──► go on
                 ├── over the bound: 429        ├── its patience is over: 503
                 └── cancelled: the client left
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from prefixcache.errors import NoWorkerReady, Overloaded, Unavailable
from prefixcache.limits import HELD_DOWN_S, HELD_POLL_S, MAX_HELD_REQUESTS
from prefixcache.metrics import ProxyMetrics

HeldOutcome = Literal["placed", "expired", "left", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    key: Hashable
    most_room: Callable[[], int]
    least_room: int


class Patience:
    """Of one request: how long it may be held, all times together."""

    def __init__(self, held: HeldRequests, patience_s: float, clock: Callable[[], float]) -> None:
        self._held = held
        self._left_s = patience_s
        self._clock = clock

    async def wait(self, name: str, error: NoWorkerReady) -> None:
        """Returns when a worker for the model is there. Raises Overloaded at once, or `error` when it is over."""
        await self.hold(name, partial(self._held.is_there, name), error)

    def hold(
        self, key: Hashable, most_room: Callable[[], int], error: Unavailable, *, least_room: int = 1
    ) -> asyncio.Future[None]:
        """As `HeldRequests.hold`."""
        began = self._clock()
        come = self._held.hold(key, most_room, error, self._left_s, least_room=least_room)
        come.add_done_callback(lambda _: self._spend(self._clock() - began))
        return come

    def _spend(self, seconds: float) -> None:
        self._left_s -= seconds


class HeldRequests:
    """One for the process."""

    def __init__(
        self,
        is_there: Callable[[str], bool],
        metrics: ProxyMetrics,
        *,
        patience_s: float = HELD_DOWN_S,
        most_held: int = MAX_HELD_REQUESTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_there`: whether a worker for a model can take a request; asked every HELD_POLL_S while any is held."""
        self.is_there = is_there
        self._metrics = metrics
        self._patience_s = patience_s
        self.most_held = most_held
        self._clock = clock
        self._waiting: dict[asyncio.Future[None], _Wait] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._closed: Unavailable | None = None
        for outcome in get_args(HeldOutcome):
            metrics.held_requests.labels(outcome)
        metrics.num_requests_held.set_function(lambda: self.num_held)

    @property
    def num_held(self) -> int:
        return len(self._waiting)

    def patience(self) -> Patience:
        """Of a request that came now."""
        return Patience(self, self._patience_s, self._clock)

    def hold(
        self,
        key: Hashable,
        most_room: Callable[[], int],
        error: Unavailable,
        patience_s: float,
        *,
        least_room: int = 1,
    ) -> asyncio.Future[None]:
        """Done when there is a worker with the `least_room`; failed with `error` if not in time.

        `most_room` of the workers that are there, 0 without any; alike for all of one `key`.
        It lasts at least until the next look: whoever comes back at once has found nobody who takes it. To cancel it
        is to leave. Raises Overloaded, and after `turn_away` its error.
        """
        if self._closed is not None:
            self._count("refused")
            raise self._closed
        if len(self._waiting) >= self.most_held:
            self._count("refused")
            again_s = math.ceil(self._patience_s)
            raise Overloaded(
                f"{len(self._waiting)} requests wait for a worker already, try again in {again_s} s",
                retry_after_s=again_s,
            )
        loop = asyncio.get_running_loop()
        come: asyncio.Future[None] = loop.create_future()
        expiry = loop.call_later(max(patience_s, 0.0), _fail, come, error)
        self._waiting[come] = _Wait(key=key, most_room=most_room, least_room=least_room)
        come.add_done_callback(partial(self._ended, expiry, error))
        self._look_later()
        return come

    def turn_away(self, error: Unavailable) -> None:
        """Ends all that wait, and whoever comes to wait from now on, with `error`: the proxy shuts down."""
        self._closed = error
        for come in self._waiting:
            _fail(come, error)

    def _look_later(self) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(HELD_POLL_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        # One question for all that ask the same.
        room = {key: most_room() for key, most_room in {w.key: w.most_room for w in self._waiting.values()}.items()}
        for come in [come for come, wait in self._waiting.items() if wait.least_room <= room[wait.key]]:
            del self._waiting[come]
            if not come.done():
                come.set_result(None)
        if self._waiting:
            self._look_later()

    def _ended(self, expiry: asyncio.TimerHandle, error: Unavailable, come: asyncio.Future[None]) -> None:
        expiry.cancel()
        self._waiting.pop(come, None)
        if come.cancelled():
            self._count("left")
        elif come.exception() is None:
            self._count("placed")
        else:
            self._count("expired" if come.exception() is error else "refused")

    def _count(self, outcome: HeldOutcome) -> None:
        self._metrics.held_requests.labels(outcome).inc()


def _fail(come: asyncio.Future[None], error: Unavailable) -> None:
    if not come.done():
        come.set_exception(error)
