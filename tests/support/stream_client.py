"""The proxy's side of a protocol v1 stream, bare: sends what a test says and keeps what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from prefixcache.protocol import (
    MAJOR,
    MINOR,
    Beat,
    End,
    Fail,
    Frame,
    FrameReader,
    Hello,
    Prove,
    Started,
    Step,
    StepEntry,
    WorkerFrame,
    decode_from_worker,
    encode,
)
from prefixcache.worker_token import Exchange, new_nonce

TIMEOUT_S = 5.0


class StreamClient:
    """One connection to a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()
        self.received: list[WorkerFrame] = []
        self.is_closed = False

    def send(self, *frames: Frame) -> None:
        self.send_bytes(b"".join(encode(frame) for frame in frames))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def send_cut(self, data: bytes, cuts: Iterable[int]) -> None:
        """Writes `data` in pieces that end at the given places."""
        start = 0
        for end in [*cuts, len(data)]:
            self._writer.write(data[start:end])
            await self._writer.drain()
            await asyncio.sleep(0)
            start = end

    async def _receive(self) -> None:
        data = await self._reader.read(1 << 16)
        if not data:
            self.is_closed = True
        for body in self._frames.feed(data):
            frame = decode_from_worker(body)
            assert frame is not None
            self.received.append(frame)

    async def hello(self, namespace: str, nonce: bytes = b"") -> Hello:
        """Exchanges hellos and returns the worker's."""
        self.send(Hello(major=MAJOR, minor=MINOR, namespace=namespace, nonce=nonce))
        while not self.received:
            assert not self.is_closed, "closed without a hello"
            await self._receive()
        answer = self.received[0]
        assert isinstance(answer, Hello), answer
        return answer

    async def exchange(self, namespace: str, token: bytes, address: str) -> Exchange:
        """Exchanges hellos and checks the worker's proof; ours is still to be sent."""
        nonce = new_nonce()
        hello = await self.hello(namespace, nonce)
        exchange = Exchange(
            token=token, namespace=namespace, address=address, proxy_nonce=nonce, worker_nonce=hello.nonce
        )
        exchange.check("worker", hello.proof)
        return exchange

    async def started(self, request_id: str) -> None:
        """Until a step has begun that computes some of the request."""
        async with asyncio.timeout(TIMEOUT_S):
            while not any(isinstance(frame, Started) and frame.id == request_id for frame in self.received):
                assert not self.is_closed, f"closed before {request_id} was started: {self.received}"
                await self._receive()

    def ending(self, request_id: str) -> End | Fail | None:
        return next((f for f in self.received if isinstance(f, End | Fail) and f.id == request_id), None)

    async def ended(self, request_id: str, timeout_s: float = TIMEOUT_S) -> End | Fail:
        """The last word on a request."""
        async with asyncio.timeout(timeout_s):
            while (ending := self.ending(request_id)) is None:
                assert not self.is_closed, f"closed before the end of {request_id}: {self.received}"
                await self._receive()
        return ending

    async def beat(self) -> Beat:
        """The next beat to come."""
        async with asyncio.timeout(TIMEOUT_S):
            num_seen = len(self.received)
            while True:
                for frame in self.received[num_seen:]:
                    if isinstance(frame, Beat):
                        return frame
                assert not self.is_closed
                await self._receive()

    async def closed(self) -> None:
        """Until the worker closes the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.is_closed:
                try:
                    await self._receive()
                except ConnectionResetError:
                    self.is_closed = True

    def entries(self, request_id: str) -> list[StepEntry]:
        return [e for frame in self.received if isinstance(frame, Step) for e in frame.entries if e.id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for entry in self.entries(request_id) for token in entry.ids]

    async def close(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def connected(
    address: str, *, namespace: str | None = None, token: bytes | None = None
) -> AsyncIterator[StreamClient]:
    """A connection to HOST:PORT; with a namespace the hellos are exchanged already, and the token is proven."""
    host, _, port = address.rpartition(":")
    client = StreamClient(*await asyncio.open_connection(host, int(port)))
    try:
        if namespace is not None and token is not None:
            exchange = await client.exchange(namespace, token, address)
            client.send(Prove(proof=exchange.proof("proxy")))
        elif namespace is not None:
            await client.hello(namespace)
        yield client
    finally:
        await client.close()
