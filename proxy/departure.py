"""How this proxy takes leave: what it says of itself meanwhile, and whom it still serves.

    serving ──told to end──► leaving ──delay──► refusing ──nothing in hand, grace over, or told again──► gone

leaving   /ready is 503, so that balancers look elsewhere; all else goes on, but every answer closes its connection
refusing  no connection is accepted, and a request on an old one is 503; what is in hand goes on
gone      what is still in hand is told that the proxy is shutting down
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from prefixcache.errors import Unavailable
from prefixcache.limits import AWAY_RETRY_AFTER_S
from proxy.access_log import QUIET_PATHS

_logger = logging.getLogger(__name__)


class Departure:
    """One for the process; of what it serves it only keeps the number."""

    def __init__(self, *, delay_s: float, grace_s: float) -> None:
        """`delay_s`: between the turn of /ready and the first refusal; `grace_s`: for what is in hand from then on."""
        self._delay_s = delay_s
        self._grace_s = grace_s
        self._told = asyncio.Event()
        self._told_again = asyncio.Event()
        self._refuses = False
        self._num_in_hand = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_leaving(self) -> bool:
        """From the first word on."""
        return self._told.is_set()

    def tell(self) -> None:
        """To leave, or the second time to do so without further patience."""
        if self._told.is_set():
            self._told_again.set()
        self._told.set()

    async def told(self) -> None:
        """Returns when it has been told to leave."""
        await self._told.wait()

    async def leave(self, stop_listening: Callable[[], Awaitable[None]]) -> None:
        """The whole way, from leaving to gone."""
        self._told.set()
        if self._delay_s and not self._told_again.is_set():
            _logger.info("not ready any more, requests are taken for another %g s", self._delay_s)
            await _within(self._delay_s, self._told_again)
        self._refuses = True
        await stop_listening()
        if self._num_in_hand:
            _logger.info("no request is taken any more, %d are in hand", self._num_in_hand)
            await _within(self._grace_s, self._idle, self._told_again)
        if self._num_in_hand:
            _logger.warning("%d requests in hand are told that the proxy is shutting down", self._num_in_hand)

    def middleware(self) -> Middleware:
        """Counts requests while they are in hand and refuses those that come too late; probes are neither."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.rel_url.raw_path in QUIET_PATHS:
                return await handler(request)
            if self._refuses:
                raise shutting_down()
            self._num_in_hand += 1
            self._idle.clear()
            try:
                return await handler(request)
            finally:
                self._num_in_hand -= 1
                if not self._num_in_hand:
                    self._idle.set()

        return middleware

    async def close_connection(self, _request: web.Request, response: web.StreamResponse) -> None:
        """A client that gets an answer now does not send its next request to this process; `on_response_prepare`."""
        if self._told.is_set():
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()


def shutting_down() -> Unavailable:
    return Unavailable("the proxy is shutting down, try again", retry_after_s=AWAY_RETRY_AFTER_S)


async def _within(timeout_s: float, *events: asyncio.Event) -> None:
    """Until one of the events, or `timeout_s` is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
