"""One HTTP/1.1 connection to an engine: one request at a time, its answer handed on as it comes.

    idle ──start()──► waiting ──head──► body ──end──► idle      closed: by abort(), by the engine, by anything wrong
                        │  ▲ 1xx answers: dropped       │
                        └──┘                            └─► closed, if it cannot be used again

No task and no timer: the loop calls data_received, llhttp takes it apart, the sink is called. Nothing is kept: what is
not yet a piece of body is in llhttp's state or in the head, and MAX_ENGINE_HEAD_BYTES bounds it.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import httptools

from prefixcache.errors import EngineFault
from prefixcache.limits import (
    ENGINE_KEEP_ALIVE_SHARE,
    ENGINE_LOST_S,
    ENGINE_PROBE_INTERVAL_S,
    ENGINE_PROBE_S,
    MAX_ENGINE_HEAD_BYTES,
)
from proxy.engines.http_message import ResponseSink

_KEEP_ALIVE_TIMEOUT = re.compile(rb"(?:^|[\s,;])timeout\s*=\s*\"?(\d{1,6})", re.IGNORECASE)
_NUM_PROBES = 3


class ConnectionOwner(Protocol):
    """Who opened the connection."""

    def connection_free(self, connection: HttpConnection) -> None:
        """Its answer is complete and it can take another request."""

    def connection_gone(self, connection: HttpConnection) -> None:
        """It is closed."""


class HttpConnection(asyncio.Protocol):
    """`owner` hears of its state; the sink gets head and body of an exchange, `over` its end: None or what is wrong."""

    def __init__(self, place: str, owner: ConnectionOwner) -> None:
        """`place` names the engine in messages."""
        self._loop = asyncio.get_running_loop()
        self._place = place
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: ResponseSink | None = None
        self._over: Callable[[Exception | None], None] | None = None
        self._is_aborted = False
        self._begin(is_head=False)
        self.keep_alive_s: float | None = None
        """How long the engine says that it keeps an idle connection, less a margin."""

    def _begin(self, *, is_head: bool) -> None:
        self._is_head_request = is_head
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_head = False
        self._is_interim = False
        self._ends_by_close = False
        self._is_complete = False
        self._has_more = False
        """Bytes came behind the end of the answer."""
        self._is_reusable = False
        self._is_paused = False
        self._num_loose_bytes = 0
        """Received since the last piece of body: head, chunk sizes, trailers."""
        self.has_bytes = False
        """A byte of the answer came."""
        self.has_body = False
        self.moved_at = self._loop.time()
        """When the request was written or the last byte came or reading was resumed."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_busy(self) -> bool:
        return self._sink is not None

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def start(
        self,
        request: Sequence[bytes | memoryview],
        sink: ResponseSink,
        over: Callable[[Exception | None], None],
        *,
        is_head: bool,
    ) -> None:
        """Writes a whole request; from now on the sink is called, and `over` once, never before this returns."""
        assert self._sink is None and self._transport is not None
        self._begin(is_head=is_head)
        self._sink, self._over = sink, over
        for part in request:
            self._transport.write(part)

    def pause(self) -> None:
        """Reads no more; what the current read brought still comes."""
        if self._sink is not None and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self.moved_at = self._loop.time()
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes at once; sink and `over` are not called any more."""
        self._sink = self._over = None
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Exception) -> None:
        """Closes at once and ends the exchange with `error`."""
        over = self._over
        self.abort()
        if over is not None:
            over(error)

    # --- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class.
        if self._is_aborted:  # While it was being opened.
            self._transport.abort()
            return
        plain = transport.get_extra_info("socket")
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ENGINE_PROBE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ENGINE_PROBE_INTERVAL_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ENGINE_LOST_S * 1_000)

    def data_received(self, data: bytes) -> None:
        if self._sink is None:  # Nothing was asked: a late 408, or more than the answer before.
            self.abort()
            return
        self.has_bytes = True
        self.moved_at = self._loop.time()
        self._num_loose_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self.fail(cast(Exception, error.__context__ or error))
            return
        except httptools.HttpParserUpgrade:
            self.fail(EngineFault(f"the engine at {self._place} wants to speak another protocol than HTTP/1.1"))
            return
        except httptools.HttpParserError as error:
            if not self._is_complete:
                self.fail(EngineFault(f"the answer of the engine at {self._place} is no HTTP/1.1: {error}"))
                return
            self._has_more = True
        if self._is_complete:
            self._finish()
        elif self._num_loose_bytes > MAX_ENGINE_HEAD_BYTES:
            what = "between two pieces of its answer" if self._has_head else "of headers"
            self.fail(EngineFault(f"the engine at {self._place} sent over {MAX_ENGINE_HEAD_BYTES:,} bytes {what}"))

    def eof_received(self) -> None:
        if self._sink is not None and self._has_head and self._ends_by_close:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._owner.connection_gone(self)
        over = self._over
        self._sink = self._over = None
        if over is not None:
            over(self._broken(error))

    def _broken(self, error: Exception | None) -> EngineFault:
        when = "in the middle of its answer" if self.has_bytes else "before it answered"
        because = f": {error}" if error is not None else ""
        return EngineFault(f"the engine at {self._place} closed the connection {when}{because}")

    def _finish(self) -> None:
        over, transport = self._over, self._transport
        if over is None or transport is None:  # Aborted by its own sink.
            return
        self._sink = self._over = None
        # An engine that answered before it had read the request is still owed the rest of it.
        if self._is_reusable and not self._has_more and transport.get_write_buffer_size() == 0:
            if self._is_paused:
                self._is_paused = False
                transport.resume_reading()
            self._owner.connection_free(self)
        else:
            transport.abort()
        over(None)

    # --- called by llhttp

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._has_more = True
        self._reason = b""
        self._headers = []

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._is_complete:
            return
        if 100 <= status < 200:
            self._is_interim = True
            return
        if status < 100:
            raise EngineFault(f"the engine at {self._place} answered with the status {status:03}")
        self._has_head = True
        self._is_reusable = self._parser.should_keep_alive()
        self._read_framing()
        if self._sink is not None:
            self._sink.on_head(status, self._reason, self._headers)
        if self._is_head_request:
            # llhttp takes the length for that of a body to come: this connection is not used again.
            self._is_complete, self._is_reusable = True, False

    def _read_framing(self) -> None:
        has_length = False
        codings: list[bytes] = []
        for name, value in self._headers:
            lower = name.lower()
            if lower == b"content-length":
                has_length = True
            elif lower == b"transfer-encoding":
                codings.append(value.strip().lower())
            elif lower == b"keep-alive" and (found := _KEEP_ALIVE_TIMEOUT.search(value)):
                self.keep_alive_s = ENGINE_KEEP_ALIVE_SHARE * int(found[1])
        if codings not in ([], [b"chunked"]):
            names = b", ".join(codings).decode("latin-1")
            raise EngineFault(f"the engine at {self._place} answered in the transfer coding {names!r}, not in chunked")
        self._ends_by_close = not has_length and not codings

    def on_body(self, data: bytes) -> None:
        if self._is_complete:  # Behind the end, or a body to a HEAD request.
            self._has_more = True
            return
        self._num_loose_bytes = 0
        self.has_body = True
        if self._sink is not None:
            self._sink.on_data(data)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
        else:
            self._is_complete = True
