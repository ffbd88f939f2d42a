"""One listening port for protocol v1 and HTTP.

connection ── first byte ──┬── 0x00..0x04: the length of a frame, below 64 MiB ──► Stream
                           └── a letter: an HTTP method ───────────────────────► aiohttp
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from aiohttp import web
from msgspec.structs import replace

from prefixcache.errors import ConfigError
from prefixcache.limits import (
    BEAT_INTERVAL_S,
    CLOSE_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    MAX_FRAME_BYTES,
    MAX_PROXY_BACKLOG_BYTES,
)
from prefixcache.protocol import MAJOR, MINOR, Beat, Hello
from prefixcache.worker_token import Exchange, new_nonce
from worker.config import Address
from worker.engine import Engine, Event, StepOutput
from worker.engine_load import EngineLoad
from worker.stream import Stream

logger = logging.getLogger(__name__)

_HIGHEST_LENGTH_BYTE = MAX_FRAME_BYTES >> 24


def bind(address: Address) -> socket.socket:
    """Takes the address without listening yet, so that a wrong one is known before the model is loaded.

    Raises ConfigError.
    """
    try:
        family, kind, _, _, name = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(name)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    return bound


class Server:
    """Accepts connections, hands the engine's output to their streams and beats."""

    def __init__(
        self,
        *,
        engine: Engine,
        namespace: str,
        incarnation: Callable[[], int],
        started_at: float = 0.0,
        address: Callable[[], str],
        token: bytes | None = None,
        max_backlog_bytes: int = MAX_PROXY_BACKLOG_BYTES,
    ) -> None:
        """`incarnation` is asked at every hello and beat: it changes when the index lost the worker's claims.

        `address` is the one in the worker's record, known once the server listens. With a worker token, a proxy is
        served once it has proven that it knows it.
        """
        self.engine = engine
        self._namespace = namespace
        self._incarnation = incarnation
        self._started_at = started_at
        self._address = address
        self._token = token
        self._max_backlog_bytes = max_backlog_bytes
        self._streams: set[Stream] = set()
        self._undecided: set[_Undecided] = set()
        self._owes_first_tokens = False
        self._is_draining = False
        self._drained = asyncio.Event()

    @asynccontextmanager
    async def listen(self, app: web.Application, bound: socket.socket) -> AsyncIterator[Address]:
        """Serves `app` and protocol v1 on a bound socket until the block is left; yields its address."""
        loop = asyncio.get_running_loop()
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S)
        await runner.setup()
        try:
            http = runner.server
            assert http is not None
            host, port = bound.getsockname()[:2]
            address = Address(host=host, port=port)
            try:
                listener = await loop.create_server(lambda: _Undecided(self, http), sock=bound)
            except OSError as error:
                raise ConfigError(f"cannot listen on {address}: {error}") from error
            beats = asyncio.create_task(self._beat_forever(), name="beats")
            try:
                yield address
            finally:
                listener.close()
                beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)
                await self._close_connections()
        finally:
            await runner.cleanup()

    async def _close_connections(self) -> None:
        """Ends every connection; what is written already still goes out, for a bounded time.

        A worker that leaves says so also where it does not drain: only one whose engine failed is lost.
        """
        if self.engine.failure is None:
            self._is_draining = True
            self._beat(self.engine.load)
        for connection in [*self._undecided]:
            connection.close()
        streams = [*self._streams]
        for stream in streams:
            stream.close("the worker is shutting down")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for stream in streams:
                    await stream.lost.wait()
        except TimeoutError:
            for stream in streams:
                stream.abort()

    async def drain(self) -> None:
        """Takes no further request, tells every proxy so, and returns when the last one has ended."""
        self._is_draining = True
        self.engine.drain()
        self._beat(self.engine.load)
        if not self.engine.load.is_idle:
            await self._drained.wait()

    def deliver(self, output: StepOutput) -> None:
        """Writes the events of one engine turn to their streams. Called on the event loop."""
        by_stream: defaultdict[Stream, list[Event]] = defaultdict(list)
        for owner, event in output.events:
            if owner in self._streams:
                assert isinstance(owner, Stream)
                by_stream[owner].append(event)
        for stream, events in by_stream.items():
            try:
                stream.deliver(events)
            except Exception:
                logger.exception("stream from %s cut: its events could not be delivered", stream.peer)
                stream.abort()
        owes_first_tokens = output.load.waiting + output.load.prefilling > 0
        if self._owes_first_tokens and not owes_first_tokens:
            self._beat(output.load)
        self._owes_first_tokens = owes_first_tokens
        if self._is_draining and self.engine.load.is_idle:  # the output may be older than the last request
            self._drained.set()

    # --- StreamOwner ----------------------------------------------------------------------------------------

    def hello(self, proxy_nonce: bytes) -> tuple[Hello, Exchange | None]:
        mine = Hello(
            major=MAJOR,
            minor=MINOR,
            namespace=self._namespace,
            incarnation=self._incarnation(),
            started_at=self._started_at,
        )
        if self._token is None:
            return mine, None
        exchange = Exchange(
            token=self._token,
            namespace=self._namespace,
            address=self._address(),
            proxy_nonce=proxy_nonce,
            worker_nonce=new_nonce(),
        )
        return replace(mine, nonce=exchange.worker_nonce, proof=exchange.proof("worker")), exchange

    def stream_made(self, stream: Stream) -> None:
        self._streams.add(stream)

    def stream_lost(self, stream: Stream) -> None:
        self._streams.discard(stream)

    # --- beats ----------------------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
        while True:
            self._beat(self.engine.load)
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _beat(self, load: EngineLoad) -> None:
        beat = Beat(
            incarnation=self._incarnation(),
            step=load.step,
            running=load.running,
            waiting=load.waiting,
            prefilling=load.prefilling,
            draining=self._is_draining,
        )
        for stream in [*self._streams]:
            if stream.is_open:
                stream.send(beat)

    # --- connections ----------------------------------------------------------------------------------------

    def undecided_made(self, connection: _Undecided) -> None:
        """A connection that has not sent a byte yet."""
        self._undecided.add(connection)

    def undecided_gone(self, connection: _Undecided) -> None:
        """It is closed, or another protocol object has taken it over."""
        self._undecided.discard(connection)

    def new_stream(self) -> Stream:
        """The protocol object of a connection whose first byte is a frame's."""
        return Stream(self, max_backlog_bytes=self._max_backlog_bytes)


class _Undecided(asyncio.Protocol):
    """A connection until its first byte, which must come in time."""

    def __init__(self, server: Server, http: web.Server) -> None:
        self._server = server
        self._http = http
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are no subclass.
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self.close)
        self._server.undecided_made(self)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        protocol: asyncio.Protocol
        if data[0] <= _HIGHEST_LENGTH_BYTE:
            protocol = self._server.new_stream()
        else:
            protocol = self._http()
        transport, self._transport = self._transport, None
        self._end()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def close(self) -> None:
        """Ends the connection: nothing came, or the server stops."""
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.undecided_gone(self)
