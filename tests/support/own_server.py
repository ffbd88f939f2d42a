"""A server that a test may kill and start again in the same place, without touching those that tests share."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

from prefixcache.cli.children import end, spawn
from prefixcache.cli.valkey import bundled_server
from tests.support.ports import free_port
from tests.support.waiting import eventually

REPLY_TIMEOUT_S = 10.0


def binary_of(name: str) -> Path | None:
    """Of "valkey" or "redis"; None if it is not on this machine."""
    if name == "valkey":
        return bundled_server()
    found = shutil.which("redis-server")
    return Path(found) if found is not None else None


class OwnServer:
    """On a unix socket, and on TCP or, with the paths of certificates, TLS."""

    def __init__(
        self, binary: Path, folder: Path, tls: dict[str, Path] | None = None, *, is_durable: bool = False
    ) -> None:
        """`is_durable`: what it has answered survives a kill; else it comes back with the last SAVE, or empty."""
        self.port = free_port()
        self.path = folder / "server"
        self._binary = binary
        self._folder = folder
        self._tls = tls
        self._is_durable = is_durable
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Returns when it answers."""
        ports = {"port": self.port} if self._tls is None else {"port": 0, "tls-port": self.port, **self._tls}
        settings = {"bind": "127.0.0.1", "unixsocket": self.path, "dir": self._folder, "save": '""', **ports}
        if self._is_durable:
            settings["appendonly"] = "yes"
        self._process = spawn([str(self._binary), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write("".join(f"{name} {value}\n" for name, value in settings.items()).encode())
        await eventually(self._answers)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(SIGKILL)
        self._process.wait()

    @contextmanager
    def paused(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(SIGCONT)

    def flush(self) -> None:
        """Blocks until it is empty."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(REPLY_TIMEOUT_S)
            connection.connect(str(self.path))
            connection.sendall(b"FLUSHALL\r\n")
            assert connection.recv(64) == b"+OK\r\n"

    def stop(self) -> None:
        if self._process is not None:
            end(self._process, patience_s=2.0)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.settimeout(1.0)
            connection.connect(str(self.path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False


@asynccontextmanager
async def running_valkey(folder: Path) -> AsyncIterator[OwnServer]:
    """The embedded one, stopped afterwards; a test may stop and start it meanwhile."""
    binary = binary_of("valkey")
    assert binary is not None
    server = OwnServer(binary, folder)
    await server.start()
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)
