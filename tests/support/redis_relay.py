"""Stands between a client and a server, and may do to replies what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.listening import listening

_READ_BYTES = 1 << 20


class RedisRelay:
    """On a port of 127.0.0.1, in front of a unix socket."""

    def __init__(self, server_path: str) -> None:
        self.port = 0
        self.requests: list[bytes] = []
        """What arrived from clients, read by read."""
        self.num_accepted = 0
        self.byte_by_byte = False
        """Replies go on one byte a write."""
        self.delay_s = 0.0
        """By which each read of replies is held back."""
        self.cut_after_bytes: int | None = None
        """The connection is closed once so many more bytes of replies went on."""
        self._server_path = server_path

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        below_reader, below_writer = await asyncio.open_unix_connection(self._server_path)
        try:
            up = asyncio.create_task(self._requests(reader, below_writer))
            down = asyncio.create_task(self._replies(below_reader, writer))
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
        finally:
            for each in (writer, below_writer):
                each.close()  # Both before the first wait, which may be cancelled.
            for each in (writer, below_writer):
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            self.requests.append(data)
            writer.write(data)

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.cut_after_bytes is not None:
                data, self.cut_after_bytes = data[: self.cut_after_bytes], self.cut_after_bytes - len(data)
            for at in range(len(data) if self.byte_by_byte else 0):
                writer.write(data[at : at + 1])
                await writer.drain()
                await asyncio.sleep(0)
            if not self.byte_by_byte:
                writer.write(data)
            if self.cut_after_bytes is not None and self.cut_after_bytes <= 0:
                self.cut_after_bytes = None
                await writer.drain()
                return


@asynccontextmanager
async def redis_relay(url: str, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[RedisRelay]:
    """Ends when every connection has."""
    relay = RedisRelay(url.removeprefix("unix://"))
    async with listening(relay.serve, tls=tls) as relay.port:
        yield relay
