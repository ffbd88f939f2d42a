"""A worker that speaks protocol v1 on a real socket and answers what a test says.

async with FakeWorker.open(store, script=says(files, "Hello")) as worker: ...      answers by itself
async with FakeWorker.open(store) as worker:                                        driven by the test
    generate = await worker.next_generate()
    worker.started(generate.id); worker.step(generate.id, [5, 6]); worker.end(generate.id)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from tokenizers import Tokenizer

from prefixcache.hashing import namespace
from prefixcache.limits import WORKER_SUSPECT_S
from prefixcache.protocol import (
    MAJOR,
    MINOR,
    Abort,
    Accepted,
    Beat,
    End,
    EndReason,
    Fail,
    FailKind,
    Frame,
    FrameReader,
    Generate,
    Hello,
    Prove,
    ProxyFrame,
    Started,
    Step,
    StepEntry,
    TokenLogprobs,
    Usage,
    decode_from_proxy,
    encode,
)
from prefixcache.registry import WorkerRecord
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from prefixcache.worker_token import Exchange, new_nonce
from tests.support.memory_store import MemoryStore
from tests.support.tiny_tokenizer import TINY_EOS_ID, tiny_tokenizer_files

MODEL = "tiny"


def token_ids(text: str, files: TokenizerFiles | None = None) -> tuple[int, ...]:
    """Ids of a text, without any special token."""
    tokenizer = Tokenizer.from_str((files or tiny_tokenizer_files()).files["tokenizer.json"].decode())
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One answer. `fail` instead of an end once the ids are out."""

    ids: tuple[int, ...] = ()
    reason: EndReason = "stop"
    cached_tokens: int = 0
    ids_a_step: int = 1
    fail: FailKind | None = None


def made_up_logprobs(ids: Sequence[int], top_logprobs: int | None) -> tuple[TokenLogprobs, ...] | None:
    """What the worker says of drawn tokens: a log probability that tells the id, and as many likelier neighbours."""
    if top_logprobs is None:
        return None
    return tuple(
        TokenLogprobs(-id / 8, tuple((id + place, -id / 8 + 1 / (2 + place)) for place in range(top_logprobs)))
        for id in ids
    )


def says(text: str, *, cached_tokens: int = 0, reason: EndReason = "stop") -> Callable[[Generate], Script]:
    """A script that answers every request with `text`, cut to its max_tokens."""
    ids = token_ids(text)

    def script(frame: Generate) -> Script:
        if len(ids) > frame.max_tokens:
            return Script(ids=ids[: frame.max_tokens], reason="length", cached_tokens=cached_tokens)
        return Script(ids=ids, reason=reason, cached_tokens=cached_tokens)

    return script


@dataclass(slots=True)
class _Request:
    """A request that has not ended."""

    frame: Generate
    writer: asyncio.StreamWriter
    num_sent: int = 0
    cached_tokens: int = 0
    is_started: bool = False
    script: Script | None = None


@dataclass(slots=True)
class FakeWorker:
    """See the module's head; every frame it got is kept."""

    record: WorkerRecord
    files: TokenizerFiles
    script: Callable[[Generate], Script] | None = None
    hello_namespace: str | None = None
    """Another namespace to claim in the hello."""
    answers_aborts: bool = True
    is_mute: bool = False
    """Sends nothing of its own accord, so that it is soon taken for hung."""
    sends_beats: bool = True
    """Of its own accord; else frames that tell nothing of it."""
    token: bytes | None = None
    proofs: list[bytes] = field(default_factory=list)
    """What proxies proved; not checked."""
    served_files: dict[str, bytes] | None = None
    """What GET /tokenizer/files gives instead of the true files."""
    generates: list[Generate] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    asked_back: list[str] = field(default_factory=list)
    """Requests that a proxy asked for if they wait."""
    minor: int = MINOR
    """Of the protocol version it speaks."""
    http_paths: list[str] = field(default_factory=list)
    num_connections: int = 0
    _requests: dict[str, _Request] = field(default_factory=dict)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _greeted: set[asyncio.StreamWriter] = field(default_factory=set)
    _handlers: set[asyncio.Task[None]] = field(default_factory=set)
    _arrived: asyncio.Queue[Generate] = field(default_factory=asyncio.Queue)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _told: Beat | None = None
    """The last beat that the test sent."""
    _num_steps: int = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        store: MemoryStore,
        *,
        worker_id: str = "w1",
        script: Callable[[Generate], Script] | None = None,
        files: TokenizerFiles | None = None,
        model: str = MODEL,
        revision: str = "r1",
        served_names: tuple[str, ...] | None = None,
        max_model_len: int = 4096,
        port: int = 0,
        announce: bool = True,
    ) -> AsyncIterator[FakeWorker]:
        """Serves on loopback with a lease and, unless `announce` is off, a record in `store`."""
        files = files or tiny_tokenizer_files()
        space = namespace(
            model=model, revision=revision, tokenizer_fingerprint=files.fingerprint, block_size=16, stride=4
        )
        registration = await store.index(space).register()
        record = WorkerRecord(
            worker_id=worker_id,
            address="",
            namespace=space,
            incarnation=registration.incarnation,
            protocol=(MAJOR, MINOR),
            model=model,
            revision=revision,
            served_names=served_names or (model,),
            tokenizer_fingerprint=files.fingerprint,
            vocab_size=512,
            max_model_len=max_model_len,
            stop_token_ids=(TINY_EOS_ID,),
            block_size=16,
            stride=4,
            num_blocks=1024,
            kv_bytes_per_token=64,
            started_at=time.time(),
        )
        worker = cls(record=record, files=files, script=script)
        server = await asyncio.start_server(worker._connected, "127.0.0.1", port)
        tasks = [asyncio.create_task(worker._engine()), asyncio.create_task(worker._live())]
        try:
            bound = server.sockets[0].getsockname()[1]
            worker.record = msgspec.structs.replace(record, address=f"127.0.0.1:{bound}")
            if announce:
                await store.registry().announce(worker.record)
            yield worker
        finally:
            server.close()
            worker.drop()
            tasks += worker._handlers
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def next_generate(self, timeout_s: float = 5.0) -> Generate:
        """The next request that arrives."""
        async with asyncio.timeout(timeout_s):
            return await self._arrived.get()

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def accepted(self, request_id: str, position: int = 0) -> None:
        self._send(request_id, Accepted(id=request_id, position=position))

    def started(self, request_id: str, cached_tokens: int = 0) -> None:
        self._requests[request_id].cached_tokens = cached_tokens
        self._requests[request_id].is_started = True
        self._send(request_id, Started(id=request_id, cached_tokens=cached_tokens))

    def step(self, request_id: str, ids: Sequence[int], *, index: int | None = None) -> None:
        """New ids at `index`, by default after the last ones."""
        request = self._requests[request_id]
        place = request.num_sent if index is None else index
        request.num_sent = place + len(ids)
        self._send(request_id, Step(entries=(_entry(request, place, tuple(ids)),)))

    def end(
        self,
        request_id: str,
        reason: EndReason = "stop",
        *,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        request = self._requests.pop(request_id)
        cached = request.cached_tokens if cached_tokens is None else cached_tokens
        usage = Usage(
            cached_tokens=cached,
            computed_tokens=len(request.frame.prompt_ids) // 4 - cached,
            output_tokens=request.num_sent if output_tokens is None else output_tokens,
            queue_s=0.25,
            prefill_s=0.5,
            decode_s=2.0,
            preemptions=0,
        )
        _write(request.writer, End(id=request_id, reason=reason, usage=usage))

    def forget(self) -> None:
        """All it has, without a word."""
        self._requests.clear()

    def fail(self, request_id: str, kind: FailKind, message: str = "scripted", *, retry_after_s: float = 0.0) -> None:
        request = self._requests.pop(request_id)
        _write(request.writer, Fail(id=request_id, kind=kind, message=message, retry_after_s=retry_after_s))

    def beat(
        self,
        *,
        running: int = 0,
        waiting: int = 0,
        prefilling: int = 0,
        incarnation: int | None = None,
        draining: bool = False,
    ) -> None:
        frame = Beat(
            incarnation=incarnation or self.record.incarnation,
            step=0,
            running=running,
            waiting=waiting,
            prefilling=prefilling,
            draining=draining,
        )
        self._told = frame
        for writer in self._writers:
            _write(writer, frame)

    def send_bytes(self, data: bytes) -> None:
        """Raw bytes on every stream."""
        for writer in self._writers:
            writer.write(data)

    def drop(self, *, cleanly: bool = False) -> None:
        """Cuts every stream, as a process that dies; `cleanly`: closes it, as one that ends."""
        for writer in self._writers:
            if cleanly:
                writer.close()
            else:
                writer.transport.abort()
        self._writers.clear()
        self._requests.clear()

    def _send(self, request_id: str, frame: Frame) -> None:
        _write(self._requests[request_id].writer, frame)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            first = await reader.readexactly(1)
            if first[0] < 5:
                await self._serve_protocol(first, reader, writer)
            else:
                await self._serve_http(first, reader, writer)
        writer.close()

    async def _serve_protocol(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        frames = FrameReader()
        data = first
        try:
            while data:
                for body in frames.feed(data):
                    self._take(decode_from_proxy(body), writer)
                data = await reader.read(65536)
        finally:
            self._writers.discard(writer)
            self._greeted.discard(writer)

    def _hello(self, theirs: Hello) -> Hello:
        space = self.hello_namespace or self.record.namespace
        if self.token is None:
            return Hello(
                minor=self.minor,
                namespace=space,
                incarnation=self.record.incarnation,
                started_at=self.record.started_at if self.minor >= 3 else 0.0,
            )
        exchange = Exchange(
            token=self.token,
            namespace=space,
            address=self.record.address,
            proxy_nonce=theirs.nonce,
            worker_nonce=new_nonce(),
        )
        return Hello(
            namespace=space,
            incarnation=self.record.incarnation,
            nonce=exchange.worker_nonce,
            proof=exchange.proof("worker"),
        )

    def _take(self, frame: ProxyFrame | None, writer: asyncio.StreamWriter) -> None:
        match frame:
            case Hello():
                _write(writer, self._hello(frame))
                self._greeted.add(writer)
            case Prove():
                self.proofs.append(frame.proof)
            case Generate():
                self.generates.append(frame)
                request = _Request(frame, writer)
                self._requests[frame.id] = request
                if self.script is not None:
                    request.script = self.script(frame)
                    self.accepted(frame.id)
                    self.started(frame.id, request.script.cached_tokens)
                    self._work.set()
                self._arrived.put_nowait(frame)
            case Abort(if_waiting=True):
                self.asked_back.append(frame.id)
                known = self._requests.get(frame.id)
                if self.answers_aborts and known is not None and not known.is_started:
                    self.end(frame.id, "aborted")
            case Abort():
                self.aborts.append(frame.id)
                if self.answers_aborts and frame.id in self._requests:
                    self.end(frame.id, "aborted")

    async def _live(self) -> None:
        """Beats that say again what the test's last one did, but never that nothing is owed: only a test says so."""
        while True:
            await asyncio.sleep(WORKER_SUSPECT_S / 4)
            if not self.is_mute:
                frame = self._beat_of_its_own() if self.sends_beats else Accepted(id="nobody's", position=0)
                for writer in self._writers & self._greeted:
                    _write(writer, frame)

    def _beat_of_its_own(self) -> Beat:
        told = self._told or Beat(incarnation=self.record.incarnation, step=0, running=0, waiting=0)
        if told.running or told.waiting:
            return told
        self._num_steps += 1
        return msgspec.structs.replace(told, step=self._num_steps, running=len(self._requests), prefilling=1)

    async def _engine(self) -> None:
        """One step frame a turn with the next ids of every scripted request, as a real engine sends them."""
        while True:
            await self._work.wait()
            scripted = [request for request in self._requests.values() if request.script is not None]
            if not scripted:
                self._work.clear()
                continue
            by_writer: dict[asyncio.StreamWriter, list[StepEntry]] = {}
            for request in scripted:
                script = request.script
                assert script is not None
                ids = script.ids[request.num_sent : request.num_sent + script.ids_a_step]
                if ids:
                    by_writer.setdefault(request.writer, []).append(_entry(request, request.num_sent, ids))
                    request.num_sent += len(ids)
            for writer, entries in by_writer.items():
                _write(writer, Step(entries=tuple(entries)))
            for request in scripted:
                script = request.script
                if script is not None and request.num_sent >= len(script.ids):
                    if script.fail is not None:
                        self.fail(request.frame.id, script.fail)
                    else:
                        self.end(request.frame.id, script.reason, cached_tokens=script.cached_tokens)
            await asyncio.sleep(0)

    async def _serve_http(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = first + await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1].decode()
        self.http_paths.append(path)
        files = self.served_files if self.served_files is not None else dict(self.files.files)
        body: bytes | None = None
        if path == "/tokenizer/manifest":
            sizes = {name: len(content) for name, content in files.items()}
            body = json.dumps({"fingerprint": self.files.fingerprint, "files": sizes}).encode()
        elif path.startswith("/tokenizer/files/"):
            body = files.get(path.removeprefix("/tokenizer/files/"))
        status = b"404 Not Found" if body is None else b"200 OK"
        content = body or b""
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(content)))
        writer.write(content)
        await writer.drain()


def _entry(request: _Request, index: int, ids: tuple[int, ...]) -> StepEntry:
    logprobs = made_up_logprobs(ids, request.frame.sampling.top_logprobs)
    return StepEntry(id=request.frame.id, index=index, ids=ids, logprobs=logprobs)


def _write(writer: asyncio.StreamWriter, frame: Frame) -> None:
    if not writer.transport.is_closing():
        writer.write(encode(frame))
