"""Asks a proxy whether it is ready: one small HTTP exchange on a connection of its own."""

from __future__ import annotations

import asyncio

from edge.address import Address
from edge.roster import Saying, Word
from prefixcache.limits import EDGE_READY_TIMEOUT_S

_QUESTION = b"GET /ready HTTP/1.0\r\nHost: edge\r\nUser-Agent: prefixcache-edge\r\n\r\n"
_PROCESS = b"x-prefixcache-proxy"


async def ask_ready(address: Address, *, timeout_s: float = EDGE_READY_TIMEOUT_S) -> Saying:
    """Never raises for what the other side does."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(_QUESTION)
                head = await reader.readuntil(b"\r\n\r\n")
            finally:
                writer.transport.abort()
    except TimeoutError:
        return Saying(Word.SILENT)
    except (OSError, EOFError, asyncio.LimitOverrunError):
        return Saying(Word.REFUSED)
    return saying_of(head)


def saying_of(head: bytes) -> Saying:
    """`head`: all before the body. A proxy that is ending closes the connection without a whole one."""
    status_line, *lines = head.split(b"\r\n")
    words = status_line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        return Saying(Word.REFUSED)
    return Saying(Word.READY if words[1] == b"200" else Word.NOT_READY, _process(lines))


def _process(lines: list[bytes]) -> str:
    for line in lines:
        name, _, value = line.partition(b":")
        if name.lower() == _PROCESS:
            return value.strip().decode("latin-1")
    return ""
