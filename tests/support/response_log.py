"""A sink that remembers what it was told, for tests of connections to engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

WAIT_S = 10.0


@dataclass(slots=True, eq=False)
class ResponseLog:
    """Refuses calls in an order that no answer has."""

    status: int | None = None
    reason: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    error: Exception | None = None
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> bytes:
        return b"".join(self.data)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def header(self, name: bytes) -> bytes | None:
        return dict((each.lower(), value) for each, value in self.headers).get(name)

    async def settled(self) -> None:
        """Waits for the end, good or bad."""
        async with asyncio.timeout(WAIT_S):
            await self._over.wait()

    async def ended(self) -> ResponseLog:
        """Waits for the end; raises what the answer failed with."""
        await self.settled()
        if self.error is not None:
            raise self.error
        return self

    async def has(self, body: bytes) -> None:
        """Waits until this much of the body came."""
        async with asyncio.timeout(WAIT_S):
            while len(self.body) < len(body) and not self.is_over:
                self._moved.clear()
                await self._moved.wait()
        assert self.body == body

    def over(self, error: Exception | None) -> None:
        """The end as a connection tells it."""
        if error is None:
            self.on_end()
        else:
            self.on_fail(error)

    # --- ResponseSink

    def on_head(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        assert self.status is None and not self.is_over
        self.status, self.reason, self.headers = status, reason, headers

    def on_data(self, data: bytes) -> None:
        assert self.status is not None and not self.is_over and data
        self.data.append(data)
        self._moved.set()

    def on_end(self) -> None:
        assert self.status is not None and not self.is_over
        self._over.set()
        self._moved.set()

    def on_fail(self, error: Exception) -> None:
        assert not self.is_over
        self.error = error
        self._over.set()
        self._moved.set()
