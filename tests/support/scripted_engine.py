"""An engine of which a test writes every byte, cut, pause and close.

    async with scripted_engine() as engine:
        engine.script(stream_head(), pieces(chat, at=range(1, 40)), when(go), LAST_CHUNK)     the next request's answer
        engine.script(reset())                                                               the one after it
        ...
        engine.requests[0].body

Answers are taken in the order in which requests come, over all connections; `engine.answer` (a function of the request)
answers when no script is left, and without it a request is answered by 599. Steps are bytes or functions of the
connection. Requests are read as far as Content-Length says; anything else on the wire is an error of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ssl import SSLContext

from tests.support.answer_bytes import json_answer

MAX_HEAD_BYTES = 1 << 20
CUT_TURNS = 4
"""Turns of the loop in which a reader on the same loop, asyncio's or uvloop's, has taken what was written before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """One request as it came."""

    connection: int
    """Connections are numbered as they come, from 0."""
    head: bytes
    """With its empty line."""
    body: bytes

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode()

    @property
    def target(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Names in lower case, in their order."""
        lines = self.head.decode("latin-1").split("\r\n")[1:-2]
        return [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]

    def header(self, name: str) -> str | None:
        """Its only value."""
        values = [value for each, value in self.headers if each == name]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None


class Closed(Exception):
    """The script closed the connection."""


@dataclass(slots=True, eq=False, kw_only=True)
class ScriptedConnection:
    """One accepted connection; what steps act on."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def turns(self, num_turns: int = CUT_TURNS) -> None:
        """Lets a reader on the same loop take what was written."""
        for _ in range(num_turns):
            await asyncio.sleep(0)


Step = bytes | Callable[[ScriptedConnection], Awaitable[None]]


def pieces(data: bytes, *, at: Iterable[int]) -> Step:
    """Cut at these places: a reader on the same loop gets each piece by itself."""
    places = sorted({place for place in at if 0 < place < len(data)})

    async def step(connection: ScriptedConnection) -> None:
        for begin, end in zip([0, *places], [*places, len(data)], strict=True):
            await connection.send(data[begin:end])
            await connection.turns()

    return step


def each(parts: Iterable[bytes]) -> Step:
    """Parts that a reader on the same loop gets one by one."""

    async def step(connection: ScriptedConnection) -> None:
        for part in parts:
            await connection.send(part)
            await connection.turns()

    return step


def when(event: asyncio.Event) -> Step:
    """Goes on once the test set it."""

    async def step(connection: ScriptedConnection) -> None:
        await event.wait()

    return step


def tell(event: asyncio.Event) -> Step:
    """Tells the test that the script came here."""

    async def step(connection: ScriptedConnection) -> None:
        event.set()

    return step


def close() -> Step:
    """Ends the connection with FIN; after a whole answer without `Connection: close` it is a stale keep-alive."""

    async def step(connection: ScriptedConnection) -> None:
        raise Closed

    return step


def reset() -> Step:
    """Ends the connection with RST."""

    async def step(connection: ScriptedConnection) -> None:
        plain = connection.writer.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.writer.transport.abort()
        raise Closed

    return step


def half_close() -> Step:
    """FIN, and the connection goes on reading."""

    async def step(connection: ScriptedConnection) -> None:
        connection.writer.write_eof()

    return step


def never() -> Step:
    """Says nothing more; ends when the client closes."""

    async def step(connection: ScriptedConnection) -> None:
        while await connection.reader.read(1 << 16):
            pass
        raise Closed

    return step


@dataclass(slots=True, eq=False, kw_only=True)
class ScriptedEngine:
    """What a test writes and reads."""

    host: str
    port: int = 0
    scheme: str = "http"
    requests: list[ReceivedRequest] = field(default_factory=list)
    answer: Callable[[ReceivedRequest], Sequence[Step]] | None = None
    """For requests without a script of their own, such as those of probes."""
    errors: list[Exception] = field(default_factory=list)
    """What went wrong in the engine itself; checked at its end."""
    num_accepted: int = 0
    connections: set[ScriptedConnection] = field(default_factory=set)
    """Those that stand."""
    _scripts: deque[Sequence[Step]] = field(default_factory=deque)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def num_scripts_left(self) -> int:
        return len(self._scripts)

    def script(self, *steps: Step) -> None:
        """The answer to one request."""
        self._scripts.append(steps)

    def close_idle(self) -> None:
        """Closes every connection from the engine's side, whatever stands on it."""
        for connection in self.connections:
            connection.writer.close()

    def stop_listening(self) -> None:
        """Refuses connections from now on; those that stand go on."""
        assert self._server is not None
        self._server.close()

    def _steps_for(self, request: ReceivedRequest) -> Sequence[Step]:
        if self._scripts:
            return self._scripts.popleft()
        if self.answer is not None:
            return self.answer(request)
        return (json_answer({"error": {"message": f"no script for {request.target}"}}, status=599),)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ScriptedConnection(number=self.num_accepted, reader=reader, writer=writer)
        self.num_accepted += 1
        self.connections.add(connection)
        try:
            while (request := await _read_request(connection)) is not None:
                self.requests.append(request)
                for step in self._steps_for(request):
                    await (connection.send(step) if isinstance(step, bytes) else step(connection))
        except (Closed, ConnectionError):
            pass
        finally:
            self.connections.discard(connection)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()


async def _read_request(connection: ScriptedConnection) -> ReceivedRequest | None:
    """None when the client closed between two requests."""
    try:
        head = await connection.reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise AssertionError(f"the client closed within a head: {error.partial!r}") from error
        return None
    lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    assert len(lengths) <= 1, f"{len(lengths)} Content-Length headers"
    try:
        body = await connection.reader.readexactly(lengths[0]) if lengths else b""
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the client closed within a body") from error
    return ReceivedRequest(connection=connection.number, head=head, body=body)


@asynccontextmanager
async def scripted_engine(host: str = "127.0.0.1", *, tls: SSLContext | None = None) -> AsyncIterator[ScriptedEngine]:
    """Listens on a free port until the block is left; an error inside the engine fails the test then."""
    engine = ScriptedEngine(host=host, scheme="http" if tls is None else "https")
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            await engine._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # A cancelled one would be logged by asyncio.
        except Exception as error:
            engine.errors.append(error)

    engine._server = server = await asyncio.start_server(accept, host, 0, limit=MAX_HEAD_BYTES, ssl=tls)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(engine.connections):
            connection.writer.transport.abort()
        await server.wait_closed()
    assert not engine.errors, engine.errors
