"""Keep-alive connections to one engine.

    send() ─► slot (ENGINE_CONNECTIONS) ─► newest idle connection, else a fresh one ─► request written ─► ResponseHandle
                                                   │
                 closed without one byte of answer │ it was idle when the engine closed it: so are all older ones,
                                                   ▼ they are dropped, and the request goes out again, once
                                             a fresh one

A slot is held from send() to the end of the answer, whatever ends it. A fresh connection is opened only where none is
idle, so there are never more connections than slots (and fetches). One timer looks after all limits; no limit is on
the whole of an answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from prefixcache.errors import EngineFault, EngineTimeout, EngineUnreachable, Unavailable
from prefixcache.limits import (
    CONNECT_TIMEOUT_S,
    ENGINE_CONNECTIONS,
    ENGINE_GAP_S,
    ENGINE_KEEP_ALIVE_S,
    ENGINE_WATCH_S,
)
from proxy.engines.engine_url import EngineUrl
from proxy.engines.http_connection import HttpConnection
from proxy.engines.http_message import EngineRequest, FetchedResponse, Headers, ResponseSink, request_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeouts:
    """Seconds; None is no limit. Time during which the client's backpressure stops the reading does not count."""

    connect_s: float = CONNECT_TIMEOUT_S
    first_byte_s: float | None = None
    """Until the first byte of body, since the write or the head: engines send a stream's head before they prefill."""
    gap_s: float | None = ENGINE_GAP_S
    """Between two pieces from then on."""
    keep_alive_s: float = ENGINE_KEEP_ALIVE_S
    """A connection idle for longer is not used again."""

    @property
    def watch_s(self) -> float:
        limits = (self.first_byte_s, self.gap_s, self.keep_alive_s)
        return min(ENGINE_WATCH_S, *(limit / 4 for limit in limits if limit is not None))


class ResponseHandle:
    """One request from its write to the end of its answer."""

    def __init__(
        self,
        pool: HttpPool,
        request: Sequence[bytes | memoryview],
        sink: ResponseSink,
        *,
        is_head: bool,
        has_slot: bool,
    ) -> None:
        self._pool = pool
        self._request = request
        self._sink = sink
        self._is_head = is_head
        self._has_slot = has_slot
        self._connection: HttpConnection | None = None
        self._may_resend = False
        self._resending: asyncio.Task[None] | None = None
        self._is_paused = False
        self._is_over = False
        self._began = False

    @property
    def began(self) -> bool:
        """Whether a byte of the answer came: as long as none did, another engine may be asked."""
        return self._began or (self._connection is not None and self._connection.has_bytes)

    def pause(self) -> None:
        """Stops the reading; what has been read already still comes."""
        self._is_paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._connection is not None:
            self._connection.resume()

    def abort(self) -> None:
        """The answer is not wanted any more: its connection is closed, the sink hears nothing more. May be repeated."""
        if self._is_over:
            return
        connection, resending = self._connection, self._resending
        self._close()
        if connection is not None:
            connection.abort()
        if resending is not None:
            resending.cancel()

    def forget_request(self) -> None:
        """Its answer has begun, so that it is not sent again."""
        self._request = ()

    # --- called by the pool

    def begin(self, connection: HttpConnection, *, is_reused: bool) -> None:
        self._connection, self._may_resend, self._resending = connection, is_reused, None
        connection.start(self._request, self._sink, self._connection_over, is_head=self._is_head)
        if self._is_paused:
            connection.pause()

    def fail(self, error: Exception) -> None:
        """No fresh connection for it, or none any more."""
        if not self._is_over:
            self._close()
            self._sink.on_fail(error)

    def _connection_over(self, error: Exception | None) -> None:
        assert self._connection is not None
        if error is None:
            self._close()
            self._sink.on_end()
        elif self._may_resend and not self._connection.has_bytes and type(error) is EngineFault:
            self._connection = None
            self._resending = self._pool.resend(self)
        else:
            self._close()
            self._sink.on_fail(error)

    def _close(self) -> None:
        self._began = self.began
        self._is_over = True
        self._connection = self._resending = None
        self._request = ()
        if self._has_slot:
            self._pool.free_slot()


class HttpPool:
    """All connections of this process to one engine."""

    def __init__(
        self,
        url: str,
        *,
        max_connections: int = ENGINE_CONNECTIONS,
        timeouts: EngineTimeouts | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raises ConfigError for a bad URL. `tls` stands in for the system's certificate authorities."""
        self._url = EngineUrl.parse(url)
        self._timeouts = timeouts or EngineTimeouts()
        self._tls = (tls or ssl.create_default_context()) if self._url.is_tls else None
        self._slots = asyncio.Semaphore(max_connections)
        self._connections: set[HttpConnection] = set()
        self._idle: dict[HttpConnection, float] = {}
        """With the time until which each may be used, in the order in which they became idle."""
        self._resending: dict[asyncio.Task[None], ResponseHandle] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._all_gone: asyncio.Event | None = None
        """Set once closing is done; there is one from aclose() on."""

    @property
    def url(self) -> str:
        """As given, without a slash at its end."""
        return self._url.text

    @property
    def place(self) -> EngineUrl:
        return self._url

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def send(self, request: EngineRequest, sink: ResponseSink) -> ResponseHandle:
        """Returns once the request is written; waits for a slot as long as the caller does.

        Raises EngineUnreachable, and InvalidRequest for what cannot be written as one request. From its return on the
        caller owns the handle: abort() unless the sink heard the end.
        """
        written = request_parts(request, self._url)
        await self._slots.acquire()
        try:
            connection, is_reused = await self._take()
        except BaseException:
            self._slots.release()
            raise
        handle = ResponseHandle(self, written, sink, is_head=request.method == "HEAD", has_slot=True)
        handle.begin(connection, is_reused=is_reused)
        return handle

    async def fetch(
        self, method: str, path: str, *, headers: Headers = (), body: bytes = b"", timeout_s: float, most_bytes: int
    ) -> FetchedResponse:
        """A small answer as a whole, beside all slots, so that a full engine can still be asked how it is.

        Raises EngineUnreachable, EngineTimeout after `timeout_s` in all, EngineFault also past `most_bytes`.
        """
        written = request_parts(EngineRequest(method=method, target=path, headers=headers, body=body), self._url)
        sink = _Collector(self.url, path, most_bytes)
        handle = ResponseHandle(self, written, sink, is_head=method == "HEAD", has_slot=False)
        try:
            async with asyncio.timeout(timeout_s):
                connection, is_reused = await self._take()
                handle.begin(connection, is_reused=is_reused)
                return await sink.whole
        except TimeoutError as error:
            raise EngineTimeout(f"the engine at {self.url} did not answer {path} within {timeout_s:g} s") from error
        finally:
            handle.abort()

    async def aclose(self) -> None:
        """Ends every request with Unavailable and returns once all connections are closed."""
        self._all_gone = asyncio.Event()
        if self._watch is not None:
            self._watch.cancel()
        error = Unavailable(f"the proxy is closing its connections to the engine at {self.url}")
        for connection in list(self._connections):
            connection.fail(error)
        resending = list(self._resending.items())
        for task, handle in resending:
            task.cancel()
            handle.fail(error)
        await asyncio.gather(*(task for task, _ in resending), return_exceptions=True)
        if self._connections:
            await self._all_gone.wait()

    # --- called by handles

    def free_slot(self) -> None:
        self._slots.release()

    def resend(self, handle: ResponseHandle) -> asyncio.Task[None]:
        """On a fresh connection; those that are idle have been so for longer than the one that failed."""
        self._drop_idle()
        task = asyncio.get_running_loop().create_task(self._resend(handle))
        self._resending[task] = handle
        task.add_done_callback(self._resending.pop)
        return task

    async def _resend(self, handle: ResponseHandle) -> None:
        try:
            connection = await self._connect()
        except EngineUnreachable as error:
            handle.fail(error)
        else:
            handle.begin(connection, is_reused=False)

    # --- called by connections

    def connection_free(self, connection: HttpConnection) -> None:
        keep_alive_s = self._timeouts.keep_alive_s
        if connection.keep_alive_s is not None:
            keep_alive_s = min(keep_alive_s, connection.keep_alive_s)
        self._idle[connection] = asyncio.get_running_loop().time() + keep_alive_s

    def connection_gone(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)
        if self._all_gone is not None and not self._connections:
            self._all_gone.set()

    # --- connections

    async def _take(self) -> tuple[HttpConnection, bool]:
        """One to write on, and whether it has been used before."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, usable_until = self._idle.popitem()
            if connection.is_open and now < usable_until:
                return connection, True
            connection.abort()
        return await self._connect(), False

    async def _connect(self) -> HttpConnection:
        connection = HttpConnection(self.url, self)
        try:
            await self._open(connection)
            if self._all_gone is not None:
                raise self._unreachable("the proxy is closing its connections to it")
            if not connection.is_open:
                raise self._unreachable("it closed the connection at once")
        except BaseException:
            connection.abort()
            raise
        self._connections.add(connection)
        if self._watch is None:
            self._watch_on()
        return connection

    async def _open(self, connection: HttpConnection) -> None:
        url, connect_s = self._url, self._timeouts.connect_s
        try:
            async with asyncio.timeout(connect_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, url.host, url.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise self._unreachable(f"no connection within {connect_s:g} s") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that no resolver can be asked for.
            raise self._unreachable(str(error)) from error

    def _unreachable(self, why: str) -> EngineUnreachable:
        return EngineUnreachable(f"the engine at {self.url} cannot be reached: {why}")

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.popitem()[0].abort()

    # --- limits

    def _watch_on(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(self._timeouts.watch_s, self._look)

    def _look(self) -> None:
        """Closes what is overdue. Both loops call timers after reading: what came during a late turn has been seen."""
        self._watch = None
        if self._connections:
            self._watch_on()
        now = asyncio.get_running_loop().time()
        for connection in [connection for connection, usable_until in self._idle.items() if usable_until <= now]:
            del self._idle[connection]
            connection.abort()
        for connection in list(self._connections):
            if connection.is_busy and not connection.is_paused:
                limit_s = self._timeouts.gap_s if connection.has_body else self._timeouts.first_byte_s
                if limit_s is not None and now - connection.moved_at > limit_s:
                    connection.fail(self._silent(connection.has_body, limit_s))

    def _silent(self, has_body: bool, limit_s: float) -> EngineTimeout:
        when = "in the middle of its answer" if has_body else "before the first byte of its answer"
        return EngineTimeout(f"the engine at {self.url} was silent for more than {limit_s:g} s {when}")


class _Collector:
    """Puts a small answer together."""

    def __init__(self, place: str, path: str, most_bytes: int) -> None:
        self._place = place
        self._path = path
        self._most_bytes = most_bytes
        self.whole: asyncio.Future[FetchedResponse] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()

    def on_head(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self._status, self._headers = status, headers

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._most_bytes:
            raise EngineFault(
                f"the engine at {self._place} answered {self._path} with more than {self._most_bytes:,} bytes"
            )

    def on_end(self) -> None:
        if not self.whole.done():
            self.whole.set_result(FetchedResponse(status=self._status, headers=self._headers, body=bytes(self._body)))

    def on_fail(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)
