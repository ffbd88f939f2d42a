"""Servers for integration tests; a conftest imports the fixtures by name.

`valkey` is the embedded server, emptied before each test; `any_server` runs the test on the embedded Valkey and, where
one is on PATH, on Redis.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from prefixcache.cli.valkey import EmbeddedValkey

REPLY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server that a test may empty, pause and ask."""

    name: str
    url: str
    pid: int

    def command(self, *arguments: str | int | bytes) -> bytes:
        """Sends one command on a connection of its own and returns the raw reply (of one piece)."""
        words = [word if isinstance(word, bytes) else str(word).encode() for word in arguments]
        request = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(REPLY_TIMEOUT_S)
            connection.connect(self.url.removeprefix("unix://"))
            connection.sendall(request)
            reply = connection.recv(1 << 20)
        assert not reply.startswith(b"-"), reply
        return reply

    def flush(self) -> None:
        self.command("FLUSHALL")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The process stands still, its sockets open: as a server that swaps or a machine that sleeps."""
        os.kill(self.pid, SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, SIGCONT)

    @contextmanager
    def monitored(self) -> Iterator[Callable[[], list[list[str]]]]:
        """Gives a function that returns the words of every command that scripts called so far."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(REPLY_TIMEOUT_S)
            connection.connect(self.url.removeprefix("unix://"))
            connection.sendall(b"MONITOR\r\n")
            lines = connection.makefile("rb")
            assert lines.readline() == b"+OK\r\n"

            def commands() -> list[list[str]]:
                self.command("ECHO", "the watch is over")
                words: list[list[str]] = []
                while b"the watch is over" not in (line := lines.readline()):
                    if b" lua] " in line:
                        words.append(re.findall(r'"((?:[^"\\]|\\.)*)"', line.decode("latin-1")))
                return words

            with lines:
                yield commands


def _run(name: str, binary: Path | None) -> Iterator[Server]:
    with EmbeddedValkey(binary) as embedded:
        yield Server(name=name, url=embedded.url, pid=embedded.pid)


@pytest.fixture(scope="session")
def valkey_process() -> Iterator[Server]:
    yield from _run("valkey", None)


@pytest.fixture(scope="session")
def redis_process() -> Iterator[Server]:
    """Debian's Redis: the oldest server that is supported."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on PATH (on Debian: apt-get install redis-server); tested on Valkey only")
    yield from _run("redis", Path(found))


@pytest.fixture
def valkey(valkey_process: Server) -> Server:
    valkey_process.flush()
    return valkey_process


@pytest.fixture(params=["valkey", "redis"])
def any_server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(f"{request.param}_process")
    server.flush()
    return server
