"""The protocol v1 stream, driven by bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from prefixcache.errors import (
    Draining,
    InvalidRequest,
    Overloaded,
    PrefixCacheError,
    ProtocolError,
    Unavailable,
    WorkerFault,
)
from prefixcache.limits import MAX_FRAME_BYTES
from prefixcache.protocol import (
    Abort,
    Accepted,
    Beat,
    End,
    Fail,
    FailKind,
    Frame,
    Generate,
    Hello,
    Prove,
    Sampling,
    Started,
    Step,
    StepEntry,
    Usage,
    decode_from_proxy,
    encode,
)
from prefixcache.worker_token import NONCE_BYTES, Exchange
from proxy.fault_breaker import FaultBreaker
from proxy.worker_stream import WorkerStream
from tests.support.recording_transport import RecordingTransport

SPACE = "0123456789abcdef"
USAGE = Usage(cached_tokens=16, computed_tokens=4, output_tokens=2, queue_s=0, prefill_s=0, decode_s=0, preemptions=0)


class RecordingSink:
    """Keeps every call; raises `error` from on_tokens and on_end if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[object] = []
        self._error = error

    def on_started(self, cached_tokens: int) -> None:
        self.calls.append(("started", cached_tokens))

    def on_tokens(self, entry: StepEntry) -> None:
        self.calls.append((entry.index, entry.ids))
        if self._error is not None:
            raise self._error

    def on_end(self, end: End) -> None:
        self.calls.append(end.reason)
        if self._error is not None:
            raise self._error

    def on_fail(self, error: Exception) -> None:
        self.calls.append(error)


class Wire:
    """A stream past its hello, and what goes over it."""

    def __init__(self, *, hello: bool = True) -> None:
        self.beats: list[Beat] = []
        self.stream = WorkerStream("w1", Hello(namespace=SPACE), self.beats.append)
        self.transport = RecordingTransport(self.stream)
        self.stream.connection_made(self.transport)
        if hello:
            self.receive(Hello(namespace=SPACE, incarnation=5))

    def receive(self, *frames: Frame) -> None:
        self.stream.data_received(b"".join(map(encode, frames)))

    def sent(self) -> list[object]:
        return [decode_from_proxy(body) for body in self.transport.frames()]

    def generate(self, request_id: str, sink: RecordingSink) -> None:
        self.stream.generate(_generate(request_id), sink)


def _generate(request_id: str) -> Generate:
    return Generate(id=request_id, root=1, prompt_ids=b"\0\0\0\0", sampling=Sampling(seed=1), max_tokens=4)


def _step(*entries: tuple[str, int, tuple[int, ...]]) -> Step:
    return Step(entries=tuple(StepEntry(id=i, index=n, ids=ids) for i, n, ids in entries))


def _body(frame: dict[str, object]) -> bytes:
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(4, "big") + data


async def test_what_was_sent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    for second, name in enumerate("abcd"):
        monkeypatch.setattr(wire.stream._loop, "time", lambda second=second: float(second))
        wire.generate(name, RecordingSink())
    assert [wire.stream.num_sent_before(at) for at in (0.0, 0.5, 3.0, 9.0)] == [0, 1, 3, 4]
    wire.receive(Started(id="b", cached_tokens=0), _step(("b", 0, (1,))))
    assert wire.stream.num_sent_before(9.0) == 4
    wire.receive(End(id="b", reason="stop", usage=USAGE), Fail(id="a", kind="overloaded", message=""))
    wire.stream.abort("d", forget=True)
    assert [wire.stream.num_sent_before(at) for at in (2.5, 9.0)] == [1, 1]
    wire.transport.abort()
    assert wire.stream.num_sent_before(9.0) == 0


async def test_says_hello_first_and_knows_the_workers() -> None:
    wire = Wire()
    assert wire.sent() == [Hello(namespace=SPACE)]
    assert (await wire.stream.hello).incarnation == 5
    assert wire.stream.open


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (Hello(namespace="f" * 16), "namespace"),
        (Hello(namespace=SPACE, major=2), "protocol 2"),
        (Beat(incarnation=1, step=1, running=0, waiting=0), "before its hello"),
    ],
)
async def test_a_wrong_hello_ends_the_stream(frame: Frame, words: str) -> None:
    wire = Wire(hello=False)
    wire.receive(frame)
    with pytest.raises(ProtocolError, match=words):
        await wire.stream.hello
    assert not wire.stream.open
    await wire.stream.closed


async def test_a_peer_that_leaves_before_its_hello() -> None:
    wire = Wire(hello=False)
    wire.transport.close()
    with pytest.raises(ProtocolError, match="before its hello"):
        await wire.stream.hello


async def test_one_step_frame_serves_many_requests_in_order() -> None:
    wire = Wire()
    sinks = {name: RecordingSink() for name in "abc"}
    for name, sink in sinks.items():
        wire.generate(name, sink)
    assert (wire.stream.num_waiting, wire.stream.num_running) == (3, 0)
    wire.receive(Accepted(id="a", position=0), Started(id="a", cached_tokens=16), Started(id="b", cached_tokens=0))
    assert (wire.stream.num_waiting, wire.stream.num_running) == (1, 2)
    wire.receive(_step(("a", 0, (7,)), ("b", 0, (8, 9)), ("c", 0, (1,)), ("gone", 0, (1,))))
    assert (wire.stream.num_waiting, wire.stream.num_running) == (0, 3)
    wire.receive(End(id="a", reason="stop", usage=USAGE))
    assert sinks["a"].calls == [("started", 16), (0, (7,)), "stop"]
    assert sinks["b"].calls == [("started", 0), (0, (8, 9))]
    assert sinks["c"].calls == [(0, (1,))]
    assert (wire.stream.num_waiting, wire.stream.num_running) == (0, 2)


async def test_any_cut_of_the_bytes_gives_the_same_calls() -> None:
    wire = Wire()
    sink = RecordingSink()
    wire.generate("a", sink)
    frames = [Started(id="a", cached_tokens=0), _step(("a", 0, (1, 2))), End(id="a", reason="length", usage=USAGE)]
    for byte in b"".join(map(encode, frames)):
        wire.stream.data_received(bytes([byte]))
    assert sink.calls == [("started", 0), (0, (1, 2)), "length"]


async def test_beats_and_unknown_frames() -> None:
    wire = Wire()
    beat = Beat(incarnation=6, step=3, running=1, waiting=2)
    wire.stream.data_received(_body({"type": "telepathy", "id": "x"}))
    wire.receive(beat)
    assert wire.beats == [beat]
    assert wire.stream.open


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("refused", InvalidRequest),
        ("overloaded", Overloaded),
        ("draining", Draining),
        ("worker_fault", WorkerFault),
    ],
)
async def test_what_a_fail_means(kind: FailKind, error: type[PrefixCacheError]) -> None:
    wire = Wire()
    sink = RecordingSink()
    wire.generate("a", sink)
    wire.receive(Fail(id="a", kind=kind, message="detail of the worker"))
    (told,) = sink.calls
    assert type(told) is error
    assert ("detail" in str(told)) == (kind == "refused"), "only a refusal is about the request"
    assert wire.stream.num_waiting == 0


async def test_a_lost_stream_fails_every_request_and_takes_no_more() -> None:
    wire = Wire()
    sinks = [RecordingSink(), RecordingSink()]
    wire.generate("a", sinks[0])
    wire.generate("b", sinks[1])
    wire.receive(Started(id="b", cached_tokens=0))
    wire.transport.close()
    assert isinstance(sinks[0].calls[-1], WorkerFault)
    assert isinstance(sinks[1].calls[-1], WorkerFault)
    with pytest.raises(Unavailable):
        wire.generate("c", RecordingSink())
    await wire.stream.closed


async def test_a_worker_that_does_not_read_gets_no_more_requests() -> None:
    wire = Wire()
    wire.transport.backlog_bytes = MAX_FRAME_BYTES + 1
    with pytest.raises(Unavailable, match="does not read"):
        wire.stream.check_read()
    wire.transport.backlog_bytes = MAX_FRAME_BYTES
    wire.stream.check_read()


async def test_abort_with_and_without_forgetting() -> None:
    wire = Wire()
    kept, forgotten = RecordingSink(), RecordingSink()
    wire.generate("kept", kept)
    wire.generate("forgotten", forgotten)
    wire.stream.abort("kept", forget=False)
    wire.stream.abort("forgotten", forget=True)
    wire.stream.abort("never known", forget=True)
    assert wire.sent()[3:] == [Abort(id="kept"), Abort(id="forgotten")]
    wire.receive(End(id="kept", reason="aborted", usage=USAGE), End(id="forgotten", reason="aborted", usage=USAGE))
    assert kept.calls == ["aborted"]
    assert forgotten.calls == []


@pytest.mark.parametrize("error", [RuntimeError("our bug"), WorkerFault("skipped")])
async def test_an_exception_in_one_sink_ends_that_request_alone(error: Exception) -> None:
    wire = Wire()
    broken, sound = RecordingSink(error), RecordingSink()
    wire.generate("broken", broken)
    wire.generate("sound", sound)
    wire.receive(_step(("broken", 0, (1,)), ("sound", 0, (2,))))
    assert broken.calls == [(0, (1,)), error]
    assert sound.calls == [(0, (2,))]
    assert Abort(id="broken") in wire.sent()
    assert wire.stream.open


async def test_an_exception_at_the_end_is_told_too() -> None:
    wire = Wire()
    error = RuntimeError("our bug")
    sink = RecordingSink(error)
    wire.generate("a", sink)
    wire.receive(End(id="a", reason="stop", usage=USAGE))
    assert sink.calls == ["stop", error]


async def test_a_malformed_frame_about_one_request_fails_that_request() -> None:
    wire = Wire()
    sink, other = RecordingSink(), RecordingSink()
    wire.generate("a", sink)
    wire.generate("b", other)
    wire.stream.data_received(_body({"type": "started", "id": "a", "cached_tokens": "many"}))
    assert isinstance(sink.calls[-1], WorkerFault)
    assert other.calls == []
    assert wire.stream.open


@pytest.mark.parametrize(
    "data",
    [
        _body({"type": "step", "entries": 3}),
        _body({"type": "end", "id": "nobody's", "reason": "bored"}),
        _body({"no": "type"}),
        b"\x00\x00\x00\x01\xc1",
        b"\xff\xff\xff\xff",
        encode(Hello(namespace=SPACE)),
    ],
)
async def test_a_broken_stream_is_cut(data: bytes) -> None:
    wire = Wire()
    sink = RecordingSink()
    wire.generate("a", sink)
    wire.stream.data_received(data)
    assert not wire.stream.open
    assert isinstance(sink.calls[-1], WorkerFault)


class CountingBreaker(FaultBreaker):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def failed(self) -> None:
        self.told.append("failed")

    def gave_token(self) -> None:
        self.told.append("token")

    def answered(self) -> None:
        self.told.append("answered")


def _malformed_end(wire: Wire) -> None:
    wire.stream.data_received(_body({"type": "end", "id": "a", "reason": 7}))


def _nothing_skipped_but_its_sink_says_so(wire: Wire) -> None:
    wire.receive(_step(("faulty", 0, (1,))))


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (lambda wire: wire.receive(Fail(id="a", kind="worker_fault", message="x")), ["failed"]),
        (lambda wire: wire.receive(Fail(id="a", kind="overloaded", message="x")), []),
        (lambda wire: wire.receive(Fail(id="a", kind="draining", message="x")), []),
        (lambda wire: wire.receive(Fail(id="a", kind="refused", message="x")), []),
        (lambda wire: wire.receive(Fail(id="unknown", kind="worker_fault", message="x")), []),
        (lambda wire: wire.receive(_step(("a", 0, (1,)))), ["token"]),
        (lambda wire: wire.receive(End(id="a", reason="length", usage=USAGE)), ["answered"]),
        (lambda wire: wire.receive(End(id="a", reason="aborted", usage=USAGE)), []),
        (lambda wire: wire.transport.abort(), ["failed"]),
        (_malformed_end, ["failed"]),
        (_nothing_skipped_but_its_sink_says_so, ["token", "failed"]),
    ],
)
async def test_what_tells_of_a_sick_worker(happens: Callable[[Wire], None], told: list[str]) -> None:
    wire = Wire()
    breaker = wire.stream.breaker = CountingBreaker()
    for request_id in "abc":
        wire.generate(request_id, RecordingSink())
    wire.generate("faulty", RecordingSink(WorkerFault("it skipped tokens")))
    happens(wire)
    assert breaker.told == told


async def test_a_stream_without_requests_may_go_without_a_fault() -> None:
    wire = Wire()
    breaker = wire.stream.breaker = CountingBreaker()
    wire.transport.abort()
    assert breaker.told == []


async def test_what_a_cut_off_worker_did_is_told() -> None:
    wire = Wire()
    sink = RecordingSink()
    wire.generate("a", sink)
    wire.stream.cut("made no step for 5 s")
    assert str(sink.calls[-1]) == "worker w1 made no step for 5 s while it held the request"


async def test_a_worker_that_drains_says_so_in_its_beats() -> None:
    wire = Wire()
    wire.receive(Beat(incarnation=5, step=0, running=0, waiting=0))
    assert not wire.stream.is_draining
    wire.receive(Beat(incarnation=5, step=0, running=0, waiting=0, draining=True))
    assert wire.stream.is_draining and len(wire.beats) == 2


async def test_a_token_reaches_its_sink_inside_data_received() -> None:
    wire = Wire()
    sink = RecordingSink()
    wire.generate("a", sink)
    wire.receive(_step(("a", 0, (1,))))
    assert sink.calls == [(0, (1,))], "without a turn of the event loop"


# --- the worker token -------------------------------------------------------------------------------------

TOKEN = b"the-token-of-this-test"
ADDRESS = "10.0.0.1:7001"


class TokenWire(Wire):
    """A stream of a proxy with a token."""

    def __init__(self, token: bytes | None = TOKEN) -> None:
        self.beats = []
        self.stream = WorkerStream(
            "w1", Hello(minor=1, namespace=SPACE), self.beats.append, address=ADDRESS, token=token
        )
        self.transport = RecordingTransport(self.stream)
        self.stream.connection_made(self.transport)

    def exchange(self) -> Exchange:
        hello = self.sent()[0]
        assert isinstance(hello, Hello)
        return Exchange(
            token=TOKEN, namespace=SPACE, address=ADDRESS, proxy_nonce=hello.nonce, worker_nonce=b"w" * NONCE_BYTES
        )

    def hello(self, exchange: Exchange) -> Hello:
        return Hello(minor=1, namespace=SPACE, nonce=exchange.worker_nonce, proof=exchange.proof("worker"))


async def test_a_worker_that_proves_the_token_gets_our_proof_before_anything_else() -> None:
    wire = TokenWire()
    exchange = wire.exchange()
    wire.receive(wire.hello(exchange))
    wire.generate("a", RecordingSink())
    assert wire.stream.hello.done() and wire.stream.open
    first, proof, *_ = wire.sent()
    assert isinstance(first, Hello) and len(first.nonce) == NONCE_BYTES and first.proof == b""
    assert proof == Prove(proof=exchange.proof("proxy"))
    assert TokenWire().exchange().proxy_nonce != exchange.proxy_nonce


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda exchange: Hello(namespace=SPACE), "the worker has no worker token and this proxy has one"),
        (lambda exchange: Hello(namespace=SPACE, nonce=exchange.worker_nonce), "the worker has another worker token"),
        (lambda exchange: Hello(namespace=SPACE, nonce=b"x", proof=exchange.proof("worker")), "a nonce of 1 bytes"),
        (
            lambda exchange: Hello(namespace=SPACE, nonce=exchange.worker_nonce, proof=exchange.proof("proxy")),
            "another worker token",
        ),
        (
            lambda exchange: Hello(
                namespace=SPACE,
                nonce=exchange.worker_nonce,
                proof=replace(exchange, address="10.0.0.9:7001").proof("worker"),
            ),
            "another worker token",
        ),
        (
            lambda exchange: Hello(namespace=SPACE, nonce=b"v" * NONCE_BYTES, proof=exchange.proof("worker")),
            "another worker token",
        ),
    ],
    ids=["none", "no proof", "short nonce", "role of the proxy", "said to another address", "another nonce"],
)
async def test_a_worker_that_does_not_prove_the_token_gets_nothing(
    change: Callable[[Exchange], Hello], words: str
) -> None:
    wire = TokenWire()
    wire.receive(change(wire.exchange()))
    with pytest.raises(ProtocolError, match=words) as caught:
        await wire.stream.hello
    assert "set the same PREFIXCACHE_WORKER_TOKEN" in str(caught.value) or "nonce" in words
    assert len(wire.sent()) == 1 and not wire.stream.open
    await wire.stream.closed


async def test_a_nonce_sent_back_to_its_maker_proves_nothing() -> None:
    """A peer without the token answers with what another stream of this very proxy proved."""
    one, other = TokenWire(), TokenWire()
    nonce = one.exchange().proxy_nonce
    other.receive(Hello(namespace=SPACE, nonce=nonce, proof=b"\0" * 32))
    assert len(other.sent()) == 1, "no proof was made for it"
    with pytest.raises(ProtocolError, match="another worker token"):
        await other.stream.hello


async def test_a_proxy_without_a_token_refuses_a_worker_that_has_one() -> None:
    wire = TokenWire(token=None)
    wire.receive(Hello(namespace=SPACE, nonce=b"w" * NONCE_BYTES, proof=b"\0" * 32))
    with pytest.raises(ProtocolError, match="the worker has a worker token and this proxy has none: set the same"):
        await wire.stream.hello
    assert not wire.stream.open


async def test_a_worker_of_version_1_0_is_used_where_there_is_no_token() -> None:
    wire = TokenWire(token=None)
    wire.receive(Hello(namespace=SPACE, incarnation=5))
    assert (await wire.stream.hello).incarnation == 5
    assert len(wire.sent()) == 1
