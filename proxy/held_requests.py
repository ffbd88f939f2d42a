"""The held queue of requests for own workers: those of a model that is known while none of its workers is ready.

no worker ──► waiting, in the order of their coming ──a worker is there──► go on
                 ├── over the bound: 429        ├── its patience is over: 503
                 └── cancelled: the client left
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from prefixcache.errors import NoWorkerReady, Overloaded, Unavailable
from prefixcache.limits import HELD_DOWN_S, HELD_POLL_S, MAX_HELD_REQUESTS
from prefixcache.metrics import ProxyMetrics


class Patience:
    """Of one request: how long it may be held, all times together."""

    def __init__(self, held: HeldRequests, patience_s: float, clock: Callable[[], float]) -> None:
        self._held = held
        self._left_s = patience_s
        self._clock = clock

    async def wait(self, name: str, error: NoWorkerReady) -> None:
        """Returns when a worker for the model is there. Raises Overloaded at once, or `error` when it is over."""
        began = self._clock()
        try:
            await self._held.wait(name, error, self._left_s)
        finally:
            self._left_s -= self._clock() - began


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
        self._is_there = is_there
        self._metrics = metrics
        self._patience_s = patience_s
        self.most_held = most_held
        self._clock = clock
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._next_look: asyncio.TimerHandle | None = None
        metrics.num_requests_held.set_function(lambda: self.num_held)

    @property
    def num_held(self) -> int:
        return len(self._waiting)

    def patience(self) -> Patience:
        """Of a request that came now."""
        return Patience(self, self._patience_s, self._clock)

    async def wait(self, name: str, error: NoWorkerReady, patience_s: float) -> None:
        """At least until the next look: whoever comes back at once has found nobody who takes it."""
        if len(self._waiting) >= self.most_held:
            self._count("refused")
            again_s = math.ceil(self._patience_s)
            raise Overloaded(
                f"{len(self._waiting)} requests wait for a worker already, try again in {again_s} s",
                retry_after_s=again_s,
            )
        come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[come] = name
        self._look_later()
        outcome = "left"
        try:
            async with asyncio.timeout(max(patience_s, 0.0)):
                await come
            outcome = "placed"
        except TimeoutError:
            outcome = "expired"
            raise error from None
        except Unavailable:
            outcome = "refused"
            raise
        finally:
            self._waiting.pop(come, None)
            self._count(outcome)

    def turn_away(self, error: Unavailable) -> None:
        """Ends all that wait with `error`."""
        for come in self._waiting:
            if not come.done():
                come.set_exception(error)

    def _look_later(self) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(HELD_POLL_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        there = {name: self._is_there(name) for name in set(self._waiting.values())}
        for come in [come for come, name in self._waiting.items() if there[name]]:
            del self._waiting[come]
            if not come.done():
                come.set_result(None)
        if self._waiting:
            self._look_later()

    def _count(self, outcome: str) -> None:
        self._metrics.held_requests.labels(outcome).inc()
