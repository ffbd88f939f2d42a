"""One answer on its way from an engine to the client, as bytes.

    engine's head ──a stream that succeeds: with its first byte of body, else at once──► client's head
    engine's body ──AnswerReader (usage)──► written to the client's own transport, no task wakes up for a piece
    client slow   ──► the engine is read no further until it has caught up
    client gone   ──► the handler is cancelled, and with it the engine's answer
    engine gone   ──► before the client's head: an error, and another engine may be asked
                      after it: an error event where a stream allows one, and the connection is cut

A stream ends in one of three ways: as the engine ended it, with an error event before the cut, or by the cut alone.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from prefixcache.errors import EngineFault
from prefixcache.limits import CLIENT_DRAIN_S, RELAY_BACKLOG_BYTES
from proxy.access_log import AccessRecord
from proxy.engines.http_message import ResponseSink
from proxy.engines.http_pool import ResponseHandle
from proxy.engines.stream_end import StreamEnd
from proxy.engines.usage_reader import AnswerReader
from proxy.error_answers import described, error_code
from proxy.sse_stream import chunked

Headers = list[tuple[bytes, bytes]]
_COMMENTS = re.compile(rb"(?::[^\r\n]*(?:[\r\n]|$)|[\r\n])*")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Of an engine's answer."""

    status: int
    reason: bytes
    headers: Headers

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key.lower() == name), b"")

    @property
    def is_stream(self) -> bool:
        return self.header(b"content-type").lower().startswith(b"text/event-stream")


class EngineRefused(EngineFault):
    """The engine answered with a 5xx, of which nothing went to the client."""

    def __init__(self, status: int, engine_id: str) -> None:
        super().__init__(f"engine {engine_id} answered with status {status}")
        self.status = status if status in (502, 503, 504) else 502


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """What is known of an exchange before its answer comes."""

    engine_id: str
    reader_for: Callable[[Head], AnswerReader | None]
    """What looks at the body; None passes it unseen."""
    on_first_byte: Callable[[Head], None]
    """The first byte of body came, or the end of an answer without one."""
    on_piece: Callable[[], None]
    """For each piece: it must cost next to nothing."""
    to_client: Callable[[Headers], Headers]
    """What of an engine's headers the client gets."""
    own_headers: Mapping[str, str]
    """Put on the client's answer, in place of the engine's of these names."""
    stream_end: StreamEnd | None
    """Knows whether a stream is complete; None where only the connection tells."""
    error_event: Callable[[Exception], bytes]
    refuses_faults: bool
    """Whether a 5xx is raised as EngineRefused, for another engine may do better."""


class Relay(ResponseSink):
    """Of one request to one engine; `run` once."""

    def __init__(self, request: web.Request, record: AccessRecord, options: RelayOptions) -> None:
        self._request = request
        self._record = record
        self._options = options
        self._changed = asyncio.Event()
        self._head: Head | None = None
        self._reader: AnswerReader | None = None
        self._pending: list[bytes] = []
        self._num_pending = 0
        self._in_comment = False
        """Whether a comment before the first event has no line end yet."""
        self._has_begun = False
        """Whether a byte of body came."""
        self._is_between_events = False
        """At the end of the engine's answer: whether an event of our own fits behind it."""
        self._is_over = False
        self._error: Exception | None = None
        self._handle: ResponseHandle | None = None
        self._is_paused = False
        self._transport: asyncio.Transport | None = None
        self._chunked = False

    @property
    def reader(self) -> AnswerReader | None:
        return self._reader

    @property
    def error(self) -> Exception | None:
        """With what the engine failed, of which the client may have been told in the answer."""
        return self._error

    @property
    def head(self) -> Head | None:
        return self._head

    # --- called by the engine's connection

    def on_head(self, status: int, reason: bytes, headers: Headers) -> None:
        self._head = Head(status=status, reason=reason, headers=headers)
        self._reader = self._options.reader_for(self._head)
        self._changed.set()

    def on_data(self, data: bytes) -> None:
        self._options.on_piece()
        if not self._has_begun and not self._is_comment(data):
            self._begin()
        if self._reader is not None:
            data = self._reader.feed(data)
        if data:
            self._pass(data)

    def on_end(self) -> None:
        self._note_place()
        rest = self._reader.end() if self._reader is not None else b""
        if self._options.stream_end is not None:
            self._options.stream_end.feed(rest)
        error = self._cut_short()
        if error is None:
            self._begin()
            if rest:
                self._pass(rest)
        self._finish(error)

    def on_fail(self, error: Exception) -> None:
        self._note_place()
        self._finish(error)

    # --- the handler's side

    async def run(self, handle: ResponseHandle) -> web.StreamResponse:
        """Returns when the client's answer is over; raises what the engine failed with as long as none has begun."""
        self._handle = handle
        try:
            return await self._run()
        finally:
            handle.abort()

    async def _run(self) -> web.StreamResponse:
        while not self._may_commit():
            await self._change()
        if self._head is None or (self._error is not None and not self._has_begun):
            assert self._error is not None
            raise self._error
        if self._head.status >= HTTPStatus.INTERNAL_SERVER_ERROR and self._options.refuses_faults:
            raise EngineRefused(self._head.status, self._options.engine_id)
        response = self._response(self._head)
        writer = await response.prepare(self._request)
        assert writer is not None
        self._transport = self._request.transport
        self._flush()
        while not self._is_over:
            if self._is_paused:
                await self._catch_up(writer)
            else:
                await self._change()
        return await self._end(response)

    def _may_commit(self) -> bool:
        if self._is_over or self._has_begun or self._is_paused:
            return True
        head = self._head
        return head is not None and not (head.is_stream and head.status == HTTPStatus.OK)

    def _response(self, head: Head) -> web.StreamResponse:
        response = web.StreamResponse(status=head.status, reason=head.reason.decode("latin-1") or None)
        # With a length the client would take for whole what has all its bytes, and not the end of its stream.
        loses_length = head.is_stream or (self._reader is not None and self._reader.may_change)
        for name, value in self._options.to_client(head.headers):
            lowered = name.lower()
            if lowered == b"content-length" and loses_length:
                continue
            response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
        response.headers.update(self._options.own_headers)
        has_length = "Content-Length" in response.headers
        self._chunked = self._request.version >= HttpVersion11 and not has_length
        if head.is_stream:
            response.headers.setdefault("Cache-Control", "no-cache")
            response.headers.setdefault("X-Accel-Buffering", "no")
        return response

    def _is_comment(self, data: bytes) -> bool:
        """A comment that keeps the connection alive is no answer yet."""
        if self._in_comment:
            data = b":" + data
        if not _COMMENTS.fullmatch(data):
            return False
        self._in_comment = not data.endswith((b"\n", b"\r"))
        return True

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._changed.set()
            assert self._head is not None
            self._options.on_first_byte(self._head)

    def _pass(self, data: bytes) -> None:
        """To the client, or to what waits for its head."""
        if self._options.stream_end is not None:
            self._options.stream_end.feed(data)
        transport = self._transport
        if transport is None:
            self._pending.append(data)
            self._num_pending += len(data)
            if self._num_pending > RELAY_BACKLOG_BYTES:
                self._pause()
            return
        if transport.is_closing():
            return
        transport.write(chunked(data) if self._chunked else data)
        if transport.get_write_buffer_size() > RELAY_BACKLOG_BYTES:
            self._pause()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and self._transport is not None and not self._transport.is_closing():
            data = b"".join(pending)
            self._transport.write(chunked(data) if self._chunked else data)

    def _pause(self) -> None:
        self._is_paused = True
        self._changed.set()
        if self._handle is not None:
            self._handle.pause()

    def _note_place(self) -> None:
        """Where the stream stands, before its reader hears that it is over."""
        self._is_between_events = self._reader is not None and self._reader.is_between_events

    def _finish(self, error: Exception | None) -> None:
        self._is_over = True
        self._error = error
        self._changed.set()

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def _catch_up(self, writer: AbstractStreamWriter) -> None:
        """Until the client has read what is buffered for it, however slowly it reads; one that reads nothing is cut."""
        transport = self._transport
        assert transport is not None and self._handle is not None
        while True:
            unread = transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(CLIENT_DRAIN_S):
                    await writer.drain()
                break
            except TimeoutError:
                if transport.get_write_buffer_size() >= unread:
                    _logger.warning("a client has read nothing for %.0f s: it is cut", CLIENT_DRAIN_S)
                    transport.abort()
                    raise ConnectionResetError("the client does not read its answer") from None
        self._is_paused = False
        self._handle.resume()

    async def _end(self, response: web.StreamResponse) -> web.StreamResponse:
        if self._error is not None:
            self._cut(self._error)
            return response
        try:
            async with asyncio.timeout(CLIENT_DRAIN_S):
                await response.write_eof()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
        return response

    def _cut_short(self) -> EngineFault | None:
        """What is wrong with a stream whose connection ended in good order."""
        head, stream_end = self._head, self._options.stream_end
        is_stream = head is not None and head.is_stream and head.status == HTTPStatus.OK
        if not is_stream or stream_end is None or stream_end.is_told:
            return None
        return EngineFault(f"engine {self._options.engine_id} ended its stream before it was complete")

    def _cut(self, error: Exception) -> None:
        """Tells of the error where that is possible, and ends the connection so that nobody takes this for the end."""
        record, transport = self._record, self._transport
        record.error_code = error_code(error)
        record.status, _ = described(error)
        if transport is None or transport.is_closing():
            return
        is_stream = self._head is not None and self._head.is_stream
        if is_stream and self._is_between_events:
            event = self._options.error_event(error)
            transport.write(chunked(event) if self._chunked else event)
        transport.close()
