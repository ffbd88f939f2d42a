"""Server-sent events written as bytes to the client's own transport.

    pending ──begin()──> open ──end()──> ended            begin commits the status line; events sent before wait for it
                          └── client too slow, or gone: the connection is cut and everything later is dropped

aiohttp sends the head and the last chunk; the chunks between are framed here, because a write from the worker stream's
callback must not wake a task for every token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from aiohttp import HttpVersion11, web

from prefixcache.limits import CLIENT_DRAIN_S, MAX_STREAM_BACKLOG_BYTES

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()
_logger = logging.getLogger(__name__)


def event(value: msgspec.Struct) -> bytes:
    """One event with the value as JSON; JSON has no raw newline, so one data line holds it."""
    return b"data: %b\n\n" % _encoder.encode(value)


def chunked(data: bytes) -> bytes:
    """Frame of HTTP/1.1's chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class SseStream:
    """One client's stream of events."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._pending: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._chunked = request.version >= HttpVersion11
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def begun(self) -> bool:
        """Whether the status line is committed."""
        return self._response.prepared

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Commits status 200 and the headers, and writes what was sent so far, as fast as the client takes it.

        Raises ConnectionError if the client is gone, or does not read it within CLIENT_DRAIN_S.
        """
        self._response.headers.update(headers)
        if self._chunked:
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)
        try:
            async with asyncio.timeout(CLIENT_DRAIN_S):
                while self._pending:
                    pending, self._pending = self._pending, []
                    await self._response.write(b"".join(pending))
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read its stream") from None
        self._transport = self._request.transport

    def send(self, data: bytes) -> None:
        """Writes whole events; never blocks. A client that leaves too much unread is cut."""
        transport = self._transport
        if transport is None:
            self._pending.append(data)
            return
        if transport.is_closing() or not data:
            return
        if transport.get_write_buffer_size() > MAX_STREAM_BACKLOG_BYTES:
            _logger.warning("client left more than %d bytes unread: its stream is cut", MAX_STREAM_BACKLOG_BYTES)
            transport.abort()
            return
        transport.write(chunked(data) if self._chunked else data)

    async def end(self) -> web.StreamResponse:
        """Ends the body; waits until the client has read it, but not for ever."""
        try:
            async with asyncio.timeout(CLIENT_DRAIN_S):
                await self._response.write_eof()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
        return self._response
