"""Asks a proxy whether it is ready: one small HTTP exchange on a connection of its own."""

from __future__ import annotations

import asyncio

from edge.address import Address
from edge.roster import Word
from prefixcache.limits import EDGE_READY_TIMEOUT_S

_QUESTION = b"GET /ready HTTP/1.0\r\nHost: edge\r\nUser-Agent: prefixcache-edge\r\n\r\n"


async def ask_ready(address: Address, *, timeout_s: float = EDGE_READY_TIMEOUT_S) -> Word:
    """Never raises for what the other side does."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(_QUESTION)
                line = await reader.readline()
            finally:
                writer.transport.abort()
    except TimeoutError:
        return Word.SILENT
    except (OSError, ValueError):
        return Word.REFUSED
    return word_of(line)


def word_of(status_line: bytes) -> Word:
    """A proxy that is ending closes the connection without a word."""
    words = status_line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        return Word.REFUSED
    return Word.READY if words[1] == b"200" else Word.NOT_READY
