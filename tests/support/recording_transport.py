"""A transport that keeps what is written to it."""

from __future__ import annotations

import asyncio

from prefixcache.protocol import FrameReader


class RecordingTransport(asyncio.Transport):
    """`written` holds every byte; abort and close tell the protocol at once."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.written = b""
        self.backlog_bytes = 0
        self._protocol = protocol
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.backlog_bytes

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._protocol.connection_lost(None)

    def abort(self) -> None:
        self.close()

    def frames(self) -> list[bytes]:
        """Bodies of the protocol v1 frames written so far."""
        return FrameReader().feed(self.written)
