"""HTTP as bytes on a socket, for what a client library would never send or would hide."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

READ_TIMEOUT_S = 10.0


def post(path: str, content: bytes | dict[str, Any], *, version: str = "1.1", headers: str = "") -> bytes:
    """A whole request; `headers` are lines that end in CRLF."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


@dataclass(frozen=True, slots=True, kw_only=True)
class RawConnection:
    """One connection to the server under test."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read_to(self, end: bytes) -> bytes:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await self.reader.readuntil(end)

    async def read_all(self) -> bytes:
        """Until the server closes."""
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await self.reader.read()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, names in lower case."""
        lines = (await self.read_to(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """One chunk of the chunked coding; b"" is the last one."""
        size = int(await self.read_to(b"\r\n"), 16)
        async with asyncio.timeout(READ_TIMEOUT_S):
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def chunks(self) -> list[bytes]:
        """All chunks up to the last."""
        found: list[bytes] = []
        while data := await self.chunk():
            found.append(data)
        return found

    def reset(self) -> None:
        """Closes with RST instead of FIN."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()


@asynccontextmanager
async def raw_connection(port: int, *, receive_buffer_bytes: int | None = None) -> AsyncIterator[RawConnection]:
    """A connection that reads nothing by itself beyond its buffers."""
    plain = socket.socket()
    if receive_buffer_bytes is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
    limit = 2**16 if receive_buffer_bytes is None else 1024
    reader, writer = await asyncio.open_connection(sock=plain, limit=limit)
    try:
        yield RawConnection(reader=reader, writer=writer)
    finally:
        writer.transport.abort()
