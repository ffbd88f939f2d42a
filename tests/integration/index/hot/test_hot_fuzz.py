"""A thousand interleavings of calls, cancellations, expiries, delays and cuts over real sockets: each gets its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import hiredis

from prefixcache.errors import IndexUnavailable
from prefixcache.index.breaker import Breaker
from prefixcache.index.hot_connection import HotConnection
from tests.support.seeds import seeded

NUM_INTERLEAVINGS = 1_000
AT_ONCE = 50
DEADLINE_S = 0.010


class EchoServer:
    """Answers ECHO in order, late now and then, in pieces of any length, and sometimes closes in the middle of one."""

    def __init__(self, rand: random.Random) -> None:
        self.handlers: set[asyncio.Task[Any] | None] = set()
        self._rand = rand

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            await self._answer(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        may_send = self._rand.randrange(400) if self._rand.random() < 0.2 else 1 << 30
        while data := await reader.read(1 << 16):
            commands.feed(data)
            replies = b""
            while (command := commands.gets()) is not False:
                replies += b"$%d\r\n%b\r\n" % (len(command[1]), command[1])
            while replies:
                await asyncio.sleep(self._rand.choice((0, 0, 0, 0.5, 1.5)) * DEADLINE_S)
                cut = min(self._rand.randint(1, len(replies)), may_send)
                writer.write(replies[:cut])
                replies, may_send = replies[cut:], may_send - cut
                if not may_send:
                    return


async def interleave(path: Path, rand: random.Random) -> Counter[str]:
    """One connection's life; how its calls ended."""
    loop = asyncio.get_running_loop()
    breaker = Breaker()
    connection = HotConnection("fuzz", changed=lambda: None)
    await loop.create_unix_connection(lambda: connection, str(path))
    connection.serve(breaker, DEADLINE_S)
    calls: list[tuple[bytes, asyncio.Future[Any]]] = []
    for _ in range(rand.randrange(4, 40)):
        action = rand.random()
        if action < 0.6 and connection.is_open:
            word, future = rand.randbytes(rand.choice((0, 1, 8, 300))) + b"%d" % len(calls), loop.create_future()
            connection.send(future, "ECHO", word)
            calls.append((word, future))
        elif action < 0.75 and calls:
            rand.choice(calls)[1].cancel()
        else:
            await asyncio.sleep(rand.choice((0, 0, 0.2, 0.7)) * DEADLINE_S)
    ends: Counter[str] = Counter()
    await asyncio.wait([future for _, future in calls] or [asyncio.ensure_future(asyncio.sleep(0))], timeout=5.0)
    for word, future in calls:
        assert future.done()
        if future.cancelled():
            ends["cancelled"] += 1
        elif (error := future.exception()) is not None:
            assert isinstance(error, IndexUnavailable)
            ends["lost" if "closed" in str(error) else "expired"] += 1
        else:
            assert future.result() == word
            ends["answered"] += 1
    connection.abort(IndexUnavailable("the end"))
    await connection.lost
    assert breaker.num_owed == 0
    return ends


async def test_every_call_gets_its_own_reply_or_none(tmp_path: Path) -> None:
    rand = seeded("interleavings")
    ends: Counter[str] = Counter()
    echo = EchoServer(rand)
    server = await asyncio.start_unix_server(echo.serve, tmp_path / "echo")
    for _ in range(NUM_INTERLEAVINGS // AT_ONCE):
        for some in await asyncio.gather(*(interleave(tmp_path / "echo", rand) for _ in range(AT_ONCE))):
            ends.update(some)
    server.close()
    await asyncio.wait([handler for handler in echo.handlers if handler is not None])
    await server.wait_closed()
    assert min(ends[end] for end in ("answered", "cancelled", "expired", "lost")) > 100, ends
