"""A connection to an engine without a socket: bytes go in by hand, what it does is written down."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Any

from proxy.engines.http_connection import HttpConnection
from tests.support.response_log import ResponseLog


class ScriptedTransport(asyncio.Transport):
    """Closes as a real one does: connection_lost comes later, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.backlog_bytes = 0
        self.reads = True
        self.plain = socket.socket()
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.plain if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.backlog_bytes

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        self._is_closing = True

    def pause_reading(self) -> None:
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        self.reads = True


class ScriptedConnection:
    """One HttpConnection with its owner; `with` closes its socket."""

    def __init__(self) -> None:
        self.num_free = 0
        self.num_gone = 0
        self.transport = ScriptedTransport()
        self.connection = HttpConnection("http://engine:1", self)
        self.connection.connection_made(self.transport)

    def __enter__(self) -> ScriptedConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.transport.plain.close()

    def ask(self, request: bytes = b"GET / HTTP/1.1\r\n\r\n", *, is_head: bool = False) -> ResponseLog:
        """Starts one request; its log is what the sink heard."""
        log = ResponseLog()
        self.connection.start([request], log, log.over, is_head=is_head)
        return log

    def receive(self, *parts: bytes) -> None:
        """As the loop does: nothing after a close."""
        for part in parts:
            if not self.transport.is_closing():
                self.connection.data_received(part)

    def end(self) -> None:
        """FIN of the engine, and the close that follows it."""
        if not self.transport.is_closing():
            self.connection.eof_received()
        self.connection.connection_lost(None)

    @property
    def is_reusable(self) -> bool:
        return self.num_free == 1 and not self.transport.is_closing()

    # --- ConnectionOwner

    def connection_free(self, connection: HttpConnection) -> None:
        assert not connection.is_busy
        self.num_free += 1

    def connection_gone(self, connection: HttpConnection) -> None:
        self.num_gone += 1
