"""The bytes of a request: read once, within the room that there is, and let go of when nobody needs them any more.

    length told ──room──► read ──► kept by the request, which may be read twice ──► let go: sent on, or taken apart

A length that is not told, or that of a compressed body, counts as the longest until all of it is there. Room is taken
for the whole at once: bodies that are half there and wait for each other would never be whole.
"""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from prefixcache.errors import RequestTooLarge, RequestTooSlow, Unavailable
from prefixcache.limits import (
    BODY_GRACE_S,
    BODY_LEAST_BYTES_PER_S,
    LARGE_BODY_BYTES,
    MAX_BODY_BYTES,
    MAX_BODY_COLONS,
    MAX_BODY_COMMAS,
    MAX_BODY_LISTS,
    MAX_LARGE_BODIES_BYTES,
    MAX_MEDIUM_BODIES_BYTES,
    OFFLOAD_BODY_BYTES,
)
from proxy.body_room import BodyRoom

_COUNTED_BYTES = 256 * 1024


class Bodies:
    """Those of all requests; one for the process."""

    def __init__(self) -> None:
        self.medium = BodyRoom(MAX_MEDIUM_BODIES_BYTES)
        self.large = BodyRoom(MAX_LARGE_BODIES_BYTES)
        self._joins = asyncio.Semaphore(1)

    async def joined(self, pieces: list[bytes]) -> bytes:
        """Large ones one after the other in a thread: each takes its bytes once more, and up to 0.1 s a time."""
        async with self._joins:
            return await asyncio.to_thread(b"".join, pieces)

    def turn_away(self, error: Unavailable) -> None:
        """Whoever waits for room is told `error`, and so is whoever comes to wait."""
        self.medium.turn_away(error)
        self.large.turn_away(error)

    def middleware(self) -> Middleware:
        """Each request has a body, and holds room for it no longer than it is served."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            body = request[_BODY] = _Body(self)
            try:
                return await handler(request)
            finally:
                body.let_go()

        return middleware


class _Body:
    """Of one request."""

    __slots__ = ("_bodies", "_data", "_num_bytes", "_room")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._data: bytes | None = None
        self._room: BodyRoom | None = None
        self._num_bytes = 0
        """Room that it holds."""

    async def read(self, request: web.Request) -> bytes:
        if self._data is None:
            length = None if hdrs.CONTENT_ENCODING in request.headers else request.content_length
            is_short = length is not None and length < OFFLOAD_BODY_BYTES
            self._data = await (request.read() if is_short else self._read(request, length))
        return self._data

    def let_go(self) -> None:
        self._data = None
        self._shrink(0)

    async def _read(self, request: web.Request, length: int | None) -> bytes:
        pieces: list[bytes] = []
        num_bytes = 0
        loop = asyncio.get_running_loop()
        if length is not None:
            await self._take(length)
        try:
            async with asyncio.timeout(None if length is None else _most_s(length)) as limit:
                while piece := await request.content.readany():
                    pieces.append(piece)
                    num_bytes += len(piece)
                    if num_bytes > MAX_BODY_BYTES:
                        raise body_too_large()
                    if self._room is None and num_bytes >= OFFLOAD_BODY_BYTES:
                        await self._take(MAX_BODY_BYTES)
                        limit.reschedule(loop.time() + _most_s(MAX_BODY_BYTES))
        except TimeoutError:
            raise RequestTooSlow(
                f"the body has {num_bytes} bytes by now: send at least {BODY_LEAST_BYTES_PER_S} of them a second"
            ) from None
        self._shrink(num_bytes)
        return b"".join(pieces) if num_bytes < LARGE_BODY_BYTES else await self._bodies.joined(pieces)

    async def _take(self, num_bytes: int) -> None:
        room = self._bodies.medium if num_bytes < LARGE_BODY_BYTES else self._bodies.large
        await room.take(num_bytes)
        self._room, self._num_bytes = room, num_bytes

    def _shrink(self, num_bytes: int) -> None:
        if self._room is not None and self._num_bytes > num_bytes:
            self._room.give_back(self._num_bytes - num_bytes)
            self._num_bytes = num_bytes


_BODY = web.RequestKey("body", _Body)


async def read_body(request: web.Request) -> bytes:
    """Raises RequestTooLarge, as soon as a length over the limit is announced; RequestTooSlow; Overloaded.

    Where own workers and engines are behind one proxy it is asked for twice; the request keeps it.
    """
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise body_too_large()
    return await request[_BODY].read(request)


def let_go_of_body(request: web.Request) -> None:
    """It is not read again: others may have its room. May be repeated."""
    request[_BODY].let_go()


def body_too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the body is longer than {MAX_BODY_BYTES} bytes")


def too_many_parts() -> RequestTooLarge:
    return RequestTooLarge(
        f"the body has more than {MAX_BODY_LISTS} lists and objects, {MAX_BODY_COLONS} colons, or {MAX_BODY_COMMAS} "
        f"commas, text included"
    )


def has_too_many_parts(body: bytes, *, most_commas: int = MAX_BODY_COMMAS) -> bool:
    """Whether objects made of it would take many times its bytes; looks no further than it must."""
    if len(body) <= MAX_BODY_LISTS:
        return False
    num_lists = num_colons = num_commas = 0
    for start in range(0, len(body), _COUNTED_BYTES):
        end = start + _COUNTED_BYTES
        num_lists += body.count(b"[", start, end) + body.count(b"{", start, end)
        num_colons += body.count(b":", start, end)
        num_commas += body.count(b",", start, end)
        if num_lists > MAX_BODY_LISTS or num_colons > MAX_BODY_COLONS or num_commas > most_commas:
            return True
    return False


def _most_s(num_bytes: int) -> float:
    return BODY_GRACE_S + num_bytes / BODY_LEAST_BYTES_PER_S
