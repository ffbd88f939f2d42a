"""The protocol v1 stream to one worker: frames in, sinks called; nothing here waits for a token.

connect ──hello, proofs of the worker token──> open ── generate / abort ──►
                        ◄── accepted, started, step, end, fail, beat        one data_received decodes many of them
closed: every request still on the stream fails with WorkerFault; its sink may send it to another worker
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, cast

import msgspec

from prefixcache.errors import (
    Draining,
    InvalidRequest,
    NoWorkerReady,
    Overloaded,
    PrefixCacheError,
    ProtocolError,
    Unavailable,
    WorkerFault,
)
from prefixcache.limits import (
    CONNECT_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    MAX_FRAME_BYTES,
    RETRY_AFTER_MOST_S,
    RETRY_AFTER_S,
)
from prefixcache.protocol import (
    Abort,
    Accepted,
    Beat,
    End,
    Fail,
    Frame,
    FrameReader,
    Generate,
    Hello,
    MalformedFrame,
    Prove,
    Started,
    Step,
    StepEntry,
    WorkerFrame,
    check_hello,
    decode_from_worker,
    encode,
)
from prefixcache.worker_token import Exchange, check_nonce, new_nonce
from proxy.fault_breaker import FaultBreaker

IF_WAITING_MINOR = 2
"""The protocol's minor version from which on a worker knows `abort {if_waiting}` and tells who is `prefilling`."""

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """What becomes of one request; called straight from the stream, so no call may block."""

    def on_started(self, cached_tokens: int) -> None: ...

    def on_tokens(self, entry: StepEntry) -> None: ...

    def on_end(self, end: End) -> None:
        """Last call, or on_fail is."""

    def on_fail(self, error: Exception) -> None: ...


def _failure(worker_id: str, fail: Fail) -> PrefixCacheError:
    if fail.kind == "refused":
        return InvalidRequest(fail.message)
    if fail.kind == "worker_fault":
        _logger.error("worker %s failed request %s: %s", worker_id, fail.id, fail.message)
        return WorkerFault("the worker failed while it held the request")
    if fail.kind == "draining":
        return Draining("the worker is shutting down, try again in a moment")
    again_s = RETRY_AFTER_S
    if math.isfinite(fail.retry_after_s):
        again_s = min(max(math.ceil(fail.retry_after_s), RETRY_AFTER_S), RETRY_AFTER_MOST_S)
    return Overloaded(f"too many requests wait already, try again in {again_s} s", retry_after_s=again_s)


class WorkerStream(asyncio.Protocol):
    """Requests of this proxy process on one worker, interleaved on one connection."""

    def __init__(
        self,
        worker_id: str,
        mine: Hello,
        on_beat: Callable[[Beat], None],
        *,
        address: str = "",
        token: bytes | None = None,
        breaker: FaultBreaker | None = None,
    ) -> None:
        """With a worker token, the worker at `address` must prove that it knows it before anything else is sent.

        `breaker` is told what becomes of the requests.
        """
        loop = asyncio.get_running_loop()
        self.worker_id = worker_id
        self.hello: asyncio.Future[Hello] = loop.create_future()
        self.hello.add_done_callback(lambda hello: hello.cancelled() or hello.exception())
        self.closed: asyncio.Future[None] = loop.create_future()
        self.is_draining = False
        """Whether the worker has said that it ends soon and takes nothing new."""
        self.breaker = breaker or FaultBreaker()
        self._loop = loop
        self._mine = mine if token is None else msgspec.structs.replace(mine, nonce=new_nonce())
        self._address = address
        self._token = token
        self._on_beat = on_beat
        self._end = "vanished"
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[str, Sink] = {}
        self._running: dict[str, Sink] = {}
        self._sent_at: dict[str, float] = {}
        """Of both, in order."""

    @property
    def num_waiting(self) -> int:
        """Requests that the worker has not started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_sent_before(self, at: float) -> int:
        """Requests that were sent before `at` and have not ended, by the time of the loop."""
        return sum(1 for _ in itertools.takewhile(lambda sent_at: sent_at < at, self._sent_at.values()))

    @property
    def knows_if_waiting(self) -> bool:
        """Whether the worker can be asked for a request back that it has not started."""
        return self.hello.done() and not self.hello.exception() and self.hello.result().minor >= IF_WAITING_MINOR

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def generate(self, frame: Generate, sink: Sink) -> None:
        """Sends a request. Raises Unavailable if the stream is gone."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise Unavailable(f"the stream to worker {self.worker_id} is closed")
        data = encode(frame)
        self._waiting[frame.id] = sink
        self._sent_at[frame.id] = self._loop.time()
        transport.write(data)

    def check_read(self) -> None:
        """Raises NoWorkerReady if the worker does not read what it was sent before."""
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_FRAME_BYTES:
            raise NoWorkerReady(f"worker {self.worker_id} does not read its stream, try again in a moment")

    def abort(self, request_id: str, *, forget: bool) -> None:
        """Asks the worker to end a request that may have ended already; `forget`: its sink is not called again."""
        known = request_id in self._running or request_id in self._waiting
        if forget:
            self._sink_of_ended(request_id)
        if known and self.open:
            self._send(Abort(id=request_id))

    def abort_if_waiting(self, request_id: str) -> None:
        """Asks for a request back: its sink gets an aborted end, or `on_started` was, or is, on its way."""
        if request_id in self._waiting:
            self._send(Abort(id=request_id, if_waiting=True))

    def fail_all(self, error: PrefixCacheError) -> None:
        """Ends every request on the stream with `error`, here and at the worker."""
        held = {**self._running, **self._waiting}
        self._running.clear()
        self._waiting.clear()
        self._sent_at.clear()
        for request_id, sink in held.items():
            self._send(Abort(id=request_id))
            self._tell_failed(request_id, sink, error)

    def cut(self, reason: str = "was cut off") -> None:
        """Drops the connection; requests on it fail, and are told what the worker did."""
        if self._transport is not None:
            self._end = reason
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(self._mine)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._take_body(body)
        except ProtocolError as error:
            self._break(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.hello.done():
            self.hello.set_exception(ProtocolError(f"worker {self.worker_id} closed the stream before its hello"))
        if self._running or self._waiting:
            self.breaker.failed()  # once for all of them: they have met one fault
        self.fail_all(WorkerFault(f"worker {self.worker_id} {self._end} while it held the request"))
        if not self.closed.done():
            self.closed.set_result(None)

    def _take_body(self, body: bytes) -> None:
        try:
            frame = decode_from_worker(body)
        except MalformedFrame as error:
            sink = self._sink_of_ended(error.request_id) if error.request_id is not None else None
            if sink is None or error.request_id is None:
                raise
            _logger.error("worker %s: %s", self.worker_id, error)
            self.breaker.failed()
            self._send(Abort(id=error.request_id))
            self._tell_failed(error.request_id, sink, WorkerFault("the worker sent a malformed answer"))
            return
        if frame is not None:
            self._take(frame)

    def _take(self, frame: WorkerFrame) -> None:
        if not self.hello.done() and not isinstance(frame, Hello):
            raise ProtocolError(f"worker {self.worker_id} sent {type(frame).__name__} before its hello")
        match frame:
            case Step():
                self.breaker.gave_token()
                for entry in frame.entries:
                    sink = self._running.get(entry.id) or self._start(entry.id)
                    if sink is not None:
                        try:
                            sink.on_tokens(entry)
                        except Exception as error:
                            self._sink_failed(entry.id, sink, error)
            case Started():
                if (sink := self._start(frame.id)) is not None:
                    sink.on_started(frame.cached_tokens)
            case End():
                if (sink := self._sink_of_ended(frame.id)) is not None:
                    if frame.reason != "aborted":
                        self.breaker.answered()
                    try:
                        sink.on_end(frame)
                    except Exception as error:
                        self._sink_failed(frame.id, sink, error)
            case Fail():
                self.is_draining = self.is_draining or frame.kind == "draining"
                if (sink := self._sink_of_ended(frame.id)) is not None:
                    if frame.kind == "worker_fault":
                        self.breaker.failed()
                    self._tell_failed(frame.id, sink, _failure(self.worker_id, frame))
            case Beat():
                self.is_draining = self.is_draining or frame.draining
                self._on_beat(frame)
            case Accepted():
                pass
            case Hello():
                if self.hello.done():
                    raise ProtocolError(f"worker {self.worker_id} sent a second hello")
                check_hello(self._mine, frame)
                self._prove(frame)
                self.hello.set_result(frame)

    def _prove(self, theirs: Hello) -> None:
        """Checks the worker's proof and answers it; raises ProtocolError if only one side has a token, or another."""
        check_nonce(theirs.nonce, peer="worker", has_token=self._token is not None)
        if self._token is None:
            return
        exchange = Exchange(
            token=self._token,
            namespace=self._mine.namespace,
            address=self._address,
            proxy_nonce=self._mine.nonce,
            worker_nonce=theirs.nonce,
        )
        exchange.check("worker", theirs.proof)
        self._send(Prove(proof=exchange.proof("proxy")))

    def _start(self, request_id: str) -> Sink | None:
        sink = self._waiting.pop(request_id, None)
        if sink is not None:
            self._running[request_id] = sink
        return sink

    def _sink_of_ended(self, request_id: str) -> Sink | None:
        self._sent_at.pop(request_id, None)
        return self._running.pop(request_id, None) or self._waiting.pop(request_id, None)

    def _tell_failed(self, request_id: str, sink: Sink, error: Exception) -> None:
        """The sink may send its request to another worker; what goes wrong there concerns it alone, too."""
        try:
            sink.on_fail(error)
        except Exception as fault:
            _logger.error("request %s of worker %s failed in the proxy", request_id, self.worker_id, exc_info=fault)
            sink.on_fail(fault)

    def _sink_failed(self, request_id: str, sink: Sink, error: Exception) -> None:
        """A fault of our own in one request ends that request, not its neighbours on the stream."""
        if isinstance(error, PrefixCacheError):
            _logger.error("request %s to worker %s: %s", request_id, self.worker_id, error)
            if isinstance(error, WorkerFault):
                self.breaker.failed()
        else:
            _logger.error("request %s to worker %s failed in the proxy", request_id, self.worker_id, exc_info=error)
        self.abort(request_id, forget=True)
        self._tell_failed(request_id, sink, error)

    def _send(self, frame: Frame) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(frame))

    def _break(self, error: ProtocolError) -> None:
        if not self.hello.done():
            self.hello.set_exception(error)
        else:
            _logger.error("stream to worker %s is cut: %s", self.worker_id, error)
        self.cut("broke the protocol")


@asynccontextmanager
async def connected_stream(
    address: str,
    worker_id: str,
    mine: Hello,
    on_beat: Callable[[Beat], None],
    *,
    token: bytes | None = None,
    breaker: FaultBreaker | None = None,
) -> AsyncIterator[tuple[WorkerStream, Hello]]:
    """A stream past its hello, and that hello. Raises OSError, TimeoutError or ProtocolError; cut on exit."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        _, stream = await loop.create_connection(
            lambda: WorkerStream(worker_id, mine, on_beat, address=address, token=token, breaker=breaker),
            host.strip("[]"),
            int(port),
        )
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = await stream.hello
        yield stream, hello
    finally:
        stream.cut()
        await asyncio.shield(stream.closed)
