"""One protocol v1 connection of a proxy, as the worker sees it.

connected ── hello, and proof of the worker token ──► open ──► lost: all its requests are aborted
    │                                                  │
    └─ one of them missing, wrong or late              └─ broken frame, id used twice, backlog over the limit
       ──► closed with a logged line                      ──► closed with a logged line
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, cast

from prefixcache.errors import Overloaded, ProtocolError, RequestError, Unavailable
from prefixcache.limits import HELLO_TIMEOUT_S, MAX_HELLO_BYTES, MAX_PROXY_BACKLOG_BYTES
from prefixcache.protocol import (
    Abort,
    Accepted,
    End,
    Fail,
    FailKind,
    Frame,
    FrameReader,
    Generate,
    Hello,
    MalformedFrame,
    Prove,
    ProxyFrame,
    Step,
    StepEntry,
    check_hello,
    decode_from_proxy,
    encode,
)
from prefixcache.worker_token import MEND, Exchange, check_nonce
from worker.engine import Engine, Event

logger = logging.getLogger(__name__)


class StreamOwner(Protocol):
    """What a connection needs of the server that accepted it."""

    engine: Engine

    def hello(self, proxy_nonce: bytes) -> tuple[Hello, Exchange | None]:
        """The answer to a proxy's hello; with a worker token also what the proxy's proof is checked against."""

    def stream_made(self, stream: Stream) -> None:
        """The connection is there; the hello exchange comes next."""

    def stream_lost(self, stream: Stream) -> None:
        """The connection is gone; nothing may be written to it any more."""


class Stream(asyncio.Protocol):
    """Reads a proxy's frames into the engine and writes what the engine made of them."""

    def __init__(self, owner: StreamOwner, *, max_backlog_bytes: int = MAX_PROXY_BACKLOG_BYTES) -> None:
        self._owner = owner
        self._max_backlog_bytes = max_backlog_bytes
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._num_hello_bytes = 0
        self._hello_deadline: asyncio.TimerHandle | None = None
        self._exchange: Exchange | None = None
        """While the proxy owes its proof of the worker token."""
        self._live: set[str] = set()
        self._broken: set[str] = set()
        """Live for the engine, but failed for the proxy."""
        self.is_open = False
        """The hello exchange is done, and the worker token proven if there is one."""
        self.lost = asyncio.Event()

    # --- asyncio.Protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are no subclass.
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._hello_deadline = loop.call_later(HELLO_TIMEOUT_S, self._end_overdue)
        self._owner.stream_made(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._read(body)
            if not self.is_open:
                self._num_hello_bytes += len(data)
                if self._num_hello_bytes > MAX_HELLO_BYTES:
                    raise ProtocolError(f"no {self._awaited} within the first {MAX_HELLO_BYTES} bytes")
        except ProtocolError as error:
            self.close(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is not None:
            logger.warning("stream from %s ended before its %s: %s", self.peer, self._awaited, MEND)
        self._transport = None
        self._cancel_deadline()
        self._owner.engine.abort(self)
        self._owner.stream_lost(self)
        self.lost.set()

    def _cancel_deadline(self) -> None:
        if self._hello_deadline is not None:
            self._hello_deadline.cancel()
            self._hello_deadline = None

    @property
    def _awaited(self) -> str:
        """What must come before the stream is open."""
        return "hello" if self._exchange is None else "proof of the worker token"

    def _end_overdue(self) -> None:
        self.close(f"no {self._awaited} within {HELLO_TIMEOUT_S} s")

    # --- from the proxy -------------------------------------------------------------------------------------

    def _read(self, body: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            frame = decode_from_proxy(body)
        except MalformedFrame as error:
            if not self.is_open or error.request_id is None or error.request_id in self._live:
                raise
            self._turn_away(error.request_id, "refused", error)
            return
        if frame is not None:
            self._handle(frame)

    def _handle(self, frame: ProxyFrame) -> None:
        match frame:
            case Hello() if self.is_open or self._exchange is not None:
                raise ProtocolError("a second hello")
            case Hello():
                self._greet(frame)
            case Prove() if self._exchange is not None:
                self._exchange.check("proxy", frame.proof)
                self._exchange = None
                self._open()
            case _ if not self.is_open:
                raise ProtocolError(f"{type(frame).__name__} frame before {self._awaited}")
            case Prove():
                raise ProtocolError("a proof that was not asked for")
            case Generate():
                self._generate(frame)
            case Abort():
                self._owner.engine.abort(self, frame.id, if_waiting=frame.if_waiting)

    def _greet(self, theirs: Hello) -> None:
        mine, exchange = self._owner.hello(theirs.nonce)
        self.send(mine)
        check_hello(mine, theirs)
        check_nonce(theirs.nonce, peer="proxy", has_token=exchange is not None)
        if exchange is None:
            self._open()
        else:
            self._exchange = exchange

    def _open(self) -> None:
        self.is_open = True
        self._cancel_deadline()
        logger.info("stream from %s opened", self.peer)

    def _generate(self, request: Generate) -> None:
        if request.id in self._live:
            raise ProtocolError(f"request id {request.id!r} is in use on this stream")
        try:
            position = self._owner.engine.submit(self, request)
        except RequestError as error:
            self._turn_away(request.id, "refused", error)
        except Unavailable as error:
            self._turn_away(request.id, "overloaded" if isinstance(error, Overloaded) else "draining", error)
        except Exception as error:
            logger.exception("request %s could not be taken", request.id)
            self._turn_away(request.id, "worker_fault", error)
        else:
            self._live.add(request.id)
            self.send(Accepted(id=request.id, position=position))

    def _turn_away(self, request_id: str, kind: FailKind, error: Exception) -> None:
        self._owner.engine.metrics.requests.labels(kind).inc()
        retry_after_s = error.retry_after_s if isinstance(error, Unavailable) else None
        self.send(Fail(id=request_id, kind=kind, message=str(error), retry_after_s=retry_after_s or 0.0))

    # --- to the proxy ---------------------------------------------------------------------------------------

    def deliver(self, events: list[Event]) -> None:
        """Writes what one turn of the engine made for this stream, all new tokens in one step frame.

        A request's tokens go after its `started` and before its end, so the step frame stands between those.
        """
        entries = tuple(event for event in events if isinstance(event, StepEntry) and event.id not in self._broken)
        ends = [event for event in events if isinstance(event, End | Fail)]
        for event in events:
            if not isinstance(event, StepEntry | End | Fail):
                self.send(event)
        if entries:
            self._send_step(entries)
        for end in ends:
            self._live.discard(end.id)
            if end.id not in self._broken:
                self.send(end)
            self._broken.discard(end.id)

    def _send_step(self, entries: tuple[StepEntry, ...]) -> None:
        """One frame; if it cannot be written, one for each entry, and the requests of those that cannot be fail."""
        try:
            self.send(Step(entries=entries))
            return
        except Exception:
            logger.exception("step frame of %d requests could not be written whole", len(entries))
        for entry in entries:
            try:
                self.send(Step(entries=(entry,)))
            except Exception as error:
                self._break(entry.id, error)

    def _break(self, request_id: str, error: Exception) -> None:
        """Ends a request whose tokens cannot be written; the engine's last word on it is then not passed on."""
        self._broken.add(request_id)
        self._owner.engine.abort(self, request_id)
        self.send(Fail(id=request_id, kind="worker_fault", message=f"its tokens could not be written: {error}"))

    def send(self, frame: Frame) -> None:
        """Writes a frame unless the stream is closing; cuts a peer that does not read."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(encode(frame))
        if (backlog := transport.get_write_buffer_size()) > self._max_backlog_bytes:
            logger.warning("stream from %s cut: %d bytes unread", self.peer, backlog)
            transport.abort()

    def close(self, reason: str) -> None:
        """Closes the connection after what was written; its requests are aborted."""
        if self._transport is not None and not self._transport.is_closing():
            logger.warning("stream from %s closed: %s", self.peer, reason)
            self._exchange = None
            self._transport.close()

    def abort(self) -> None:
        """Drops the connection and what is still unwritten."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def peer(self) -> str:
        """The other side's address, for logs."""
        return str(self._transport.get_extra_info("peername")) if self._transport is not None else "nobody"
