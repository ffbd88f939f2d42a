"""A relay on loopback that can hold back what clients send, so that it arrives after what was sent later.

with relay.holding():                 what comes on connections that stand now waits; new connections pass
    ... a call times out, is sent again on another connection, and others follow ...
relay.late_replies                    what the server answered to what had been held, in the end
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from tests.support.listening import listening

_READ_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class _Connection:
    may_pass: asyncio.Event = field(default_factory=asyncio.Event)
    was_held: bool = False
    """Bytes were held back on it."""


@dataclass(slots=True, kw_only=True)
class Relay:
    """In front of a unix socket's path, or of host and port."""

    upstream: str | tuple[str, int]
    port: int = 0
    late_replies: list[bytes] = field(default_factory=list)
    _connections: set[_Connection] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_held(self) -> int:
        """Connections on which something waits or waited."""
        return sum(connection.was_held for connection in self._connections)

    @contextmanager
    def holding(self) -> Iterator[None]:
        standing = list(self._connections)
        for connection in standing:
            connection.may_pass.clear()
        try:
            yield
        finally:
            for connection in standing:
                connection.may_pass.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self.upstream, str):
            below_reader, below_writer = await asyncio.open_unix_connection(self.upstream)
        else:
            below_reader, below_writer = await asyncio.open_connection(*self.upstream)
        connection = _Connection()
        connection.may_pass.set()
        self._connections.add(connection)
        up = asyncio.create_task(self._requests(connection, reader, below_writer))
        down = asyncio.create_task(self._replies(connection, below_reader, writer))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if connection.was_held:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(down, 1.0)  # The client is gone, the server still answers.
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            for each in (writer, below_writer):
                each.transport.abort()
            self._connections.discard(connection)

    async def _requests(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            if not connection.may_pass.is_set():
                connection.was_held = True
                await connection.may_pass.wait()
            writer.write(data)
        writer.write_eof()

    async def _replies(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            if connection.was_held:
                self.late_replies.append(data)
            writer.write(data)


@asynccontextmanager
async def relay_to(upstream: str | tuple[str, int]) -> AsyncIterator[Relay]:
    """Listens on a free port until the block is left, and ends with all its connections."""
    relay = Relay(upstream=upstream)
    async with listening(relay.serve) as relay.port:
        yield relay
