"""Error replies that say that a server serves nobody now: while it loads, is busy, or is no primary."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.index import breaker
from tests.support.hot_calls import ECHO, echo, hot_client
from tests.support.waiting import eventually


class FakeServer:
    """Answers +OK, scripts with their last argument, and what is in `errors` with that."""

    def __init__(self) -> None:
        self.errors: dict[bytes, bytes] = {}
        """First word of a command -> error reply."""
        self.num_accepted = 0
        self.seen: list[bytes] = []
        self._handlers: set[asyncio.Task[Any] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handlers.add(asyncio.current_task())
        self.num_accepted += 1
        commands = hiredis.Reader()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    writer.write(self._reply(command))
            writer.close()
            await writer.wait_closed()

    def _reply(self, command: list[bytes]) -> bytes:
        self.seen.append(command[0])
        if command[0] in self.errors:
            return b"-%b\r\n" % self.errors[command[0]]
        if command[0] in (b"EVAL", b"EVALSHA"):
            return b"$%d\r\n%b\r\n" % (len(command[-1]), command[-1])
        return b"+OK\r\n"

    async def ended(self) -> None:
        await asyncio.gather(*(handler for handler in self._handlers if handler is not None))


@asynccontextmanager
async def fake_server(path: Path) -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    server = await asyncio.start_unix_server(fake.serve, path)
    yield fake
    server.close()
    await fake.ended()
    await server.wait_closed()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(breaker, "BREAKER_PAUSE_S", 0.1)
    return tmp_path / "fake"


LOADING = b"LOADING Redis is loading the dataset in memory"


@pytest.mark.parametrize(
    ("error", "is_left"),
    [
        (LOADING, False),
        (b"BUSY Redis is busy running a script", False),
        (b"READONLY You can't write against a read only replica", True),
        (b"MASTERDOWN Link with MASTER is down", True),
        (b"NOPERM this user has no permissions to run the 'evalsha' command", False),
    ],
)
@pytest.mark.parametrize("is_post", [False, True])
async def test_server_that_serves_nobody_is_tried_until_it_serves(
    path: Path, error: bytes, is_left: bool, is_post: bool
) -> None:
    async with fake_server(path) as fake, hot_client(f"unix://{path}") as client:
        await echo(client, 1)
        fake.errors = {b"EVALSHA": error, b"EVAL": error}
        if is_post:
            client.post(ECHO, "k", "v")
            await eventually(lambda: not client.is_available)
        else:
            with pytest.raises(IndexUnavailable, match=error.split()[0].decode()):
                await echo(client, 2)
        assert not client.is_available
        fake.seen.clear()
        await eventually(lambda: fake.seen.count(b"EVAL") >= 2)
        assert not client.is_available and b"EVALSHA" not in fake.seen, "trials alone are sent"
        assert (fake.num_accepted > 1) is is_left, "whether the name may lead elsewhere by now"
        fake.errors = {}
        await eventually(lambda: client.is_available)
        await echo(client, 3)


async def test_server_that_is_loading_when_it_is_connected_to(path: Path) -> None:
    async with fake_server(path) as fake:
        fake.errors = {b"SCRIPT": LOADING}
        async with hot_client(f"unix://{path}") as client:
            with pytest.raises(IndexUnavailable, match="LOADING"):
                await echo(client, 1)
            await eventually(lambda: fake.num_accepted >= 3)
            fake.errors = {}
            await eventually(lambda: client.is_available)
            await echo(client, 2)


@pytest.mark.parametrize("word", [b"SCRIPT", b"CLIENT"])
@pytest.mark.parametrize("error", [b"ERR unknown command", b"NOPERM this user has no permissions to run it"])
async def test_server_without_a_useful_command_serves_all_the_same(path: Path, word: bytes, error: bytes) -> None:
    async with fake_server(path) as fake:
        fake.errors = {word: error}
        async with hot_client(f"unix://{path}") as client:
            await echo(client, 1)
            assert fake.num_accepted == 1


async def test_script_that_the_server_will_not_keep_is_sent_once_more_and_no_more(path: Path) -> None:
    async with fake_server(path) as fake, hot_client(f"unix://{path}") as client:
        fake.errors = {b"EVALSHA": b"NOSCRIPT No matching script", b"EVAL": b"NOSCRIPT No matching script"}
        with pytest.raises(IndexUnavailable, match="NOSCRIPT"):
            await echo(client, 1)
        client.post(ECHO, "k", "v")
        await eventually(lambda: fake.seen.count(b"EVAL") == 2)
        fake.errors = {}
        await echo(client, 2)
        assert (fake.seen.count(b"EVALSHA"), fake.seen.count(b"EVAL")) == (3, 2)
        assert client.is_available


@pytest.mark.parametrize("waits", [False, True])
async def test_server_that_turns_a_connection_away_is_quoted(
    path: Path, caplog: pytest.LogCaptureFixture, *, waits: bool
) -> None:
    """Whether its word comes before the handshake was sent, or in the place of its first reply."""

    async def turn_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if waits:
            await reader.read(1 << 16)
        writer.write(b"-ERR max number of clients reached\r\n")
        writer.close()

    async with await asyncio.start_unix_server(turn_away, path), hot_client(f"unix://{path}") as client:
        with pytest.raises(IndexUnavailable, match="max number of clients"):
            await echo(client, 1)
    assert "max number of clients" in caplog.text
