"""One HTTP request on a connection of its own, and exactly what came back: how far, when, and how it ended."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

End = Literal["complete", "cut", "unanswered", "no connection", "overdue", "left"]
"""complete: to the last byte that was announced. cut: before that. unanswered: closed without a whole head.
overdue: nothing more came in time. left: we did."""

ANSWER_TIMEOUT_S = 60.0
_RESET = b"\1\0\0\0\0\0\0\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """When a client leaves, and whether its goodbye is a FIN or an RST."""

    after_s: float
    how: Literal["fin", "rst"]


@dataclass(slots=True, kw_only=True)
class Reply:
    """What came of one request."""

    asked_at: float
    """By time.monotonic(), as all times here."""
    end: End = "overdue"
    status: int | None = None
    """None until the head is whole."""
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    arrivals: list[float] = field(default_factory=list)
    """Of each piece of content."""
    ended_at: float = 0.0

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def longest_gap(self) -> tuple[float, float]:
        """Seconds between two pieces, and when that was; 0 where there are fewer."""
        return max(((later - earlier, earlier) for earlier, later in pairwise(self.arrivals)), default=(0.0, 0.0))


def post_bytes(path: str, body: Mapping[str, Any] | bytes, *, headers: str = "") -> bytes:
    """A whole request that asks for its connection to be closed."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


async def ask(
    port: int,
    request: bytes,
    *,
    leave: Leave | None = None,
    timeout_s: float = ANSWER_TIMEOUT_S,
    into: Reply | None = None,
) -> Reply:
    """Never raises for what the other side does. `into` is filled meanwhile, and returned."""
    reply = into or Reply(asked_at=time.monotonic())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        reply.end = "no connection"
        return reply
    try:
        async with asyncio.timeout(timeout_s if leave is None else leave.after_s):
            writer.write(request)
            await _read(reader, reply)
            reply.end = "complete"
    except TimeoutError:
        reply.end = "overdue" if leave is None else "left"
    except (ConnectionError, asyncio.IncompleteReadError):
        reply.end = "unanswered" if reply.status is None else "cut"
    finally:
        reply.ended_at = time.monotonic()
        if leave is not None and leave.how == "rst" and not writer.transport.is_closing():
            plain: socket.socket = writer.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
    return reply


async def _read(reader: asyncio.StreamReader, reply: Reply) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply.headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    reply.status = int(head[0].split(" ")[1])
    if reply.headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            data = await reader.readexactly(size + 2)
            reply.content += data[:-2]
            reply.arrivals.append(time.monotonic())
        await reader.readexactly(2)
    else:
        reply.content = await reader.readexactly(int(reply.headers.get("content-length", 0)))
        reply.arrivals.append(time.monotonic())
