"""A server of a test's own on loopback that is gone, with all its connections, when its block is left."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(serve: Serve, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port; `serve` is run for each connection."""
    connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not async: a connection of the last moment, whose task has not begun, is known here, too."""
        connections[writer] = asyncio.create_task(_served(serve, reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connections.values():
            task.cancel()
        await asyncio.gather(*connections.values(), return_exceptions=True)
        for writer in connections:
            writer.close()
        await server.wait_closed()


async def _served(serve: Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await serve(reader, writer)
