"""One connection, without a socket: every framing in every cut, and when it may be used again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import pairwise

import pytest

from prefixcache.errors import EngineFault
from prefixcache.limits import ENGINE_LOST_S, ENGINE_PROBE_S, MAX_ENGINE_HEAD_BYTES
from tests.support.answer_bytes import chat_events, chat_stream, chunk, chunked, head, stream_head, whole
from tests.support.response_log import ResponseLog
from tests.support.scripted_transport import ScriptedConnection

CLOSE = ("Connection", "close")
CHUNKED = ("Transfer-Encoding", "chunked")
HELLO = chunked([b"hel", b"lo"])

ANSWERS = {
    "length": (whole(b"hello"), 200, b"hello", True),
    "empty": (whole(b""), 200, b"", True),
    "chunked": (head(200, CHUNKED) + HELLO, 200, b"hello", True),
    "chunked, nothing": (head(200, CHUNKED) + chunked([]), 200, b"", True),
    "extensions": (head(200, CHUNKED) + chunked([b"hel", b"lo"], extension=b';a=1;b="c d"'), 200, b"hello", True),
    "trailers": (head(200, CHUNKED) + chunked([b"hello"], trailers=b"X-Sum: 1\r\nY: 2\r\n"), 200, b"hello", True),
    "interim": (head(100, reason="Continue") + head(103, ("Link", "a")) + whole(b"hello"), 200, b"hello", True),
    "interim, chunked": (head(103, CLOSE) + head(200, CHUNKED) + HELLO, None, b"", False),
    "no content": (head(204), 204, b"", True),
    "no content with length": (head(204, ("Content-Length", "5")), 204, b"", True),
    "not modified": (head(304, ("Content-Length", "5")), 304, b"", True),
    "close": (whole(b"hello", CLOSE), 200, b"hello", False),
    "close, chunked": (head(200, CHUNKED, CLOSE) + HELLO, 200, b"hello", False),
    "version 1.0": (head(200, ("Content-Length", "5"), version="1.0") + b"hello", 200, b"hello", False),
    "no reason": (b"HTTP/1.1 200 \r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", True),
    "empty header": (head(200, ("A", ""), ("Content-Length", "5"), ("B", "")) + b"hello", 200, b"hello", True),
    "error": (whole(b"hello", status=503, reason="Service Unavailable"), 503, b"hello", True),
    "stream": (chat_stream(["ä", "字", "🙂"]), 200, b"".join(chat_events(["ä", "字", "🙂"])), True),
}
"""Bytes -> status, body, whether the connection can be used again."""


def _cuts(data: bytes) -> Iterator[list[bytes]]:
    """Whole, byte by byte, and in two at every place."""
    yield [data]
    yield [data[place : place + 1] for place in range(len(data))]
    for place in range(1, len(data)):
        yield [data[:place], data[place:]]


@pytest.mark.parametrize("name", ANSWERS)
async def test_every_framing_in_every_cut(name: str) -> None:
    data, status, body, is_reusable = ANSWERS[name]
    for parts in _cuts(data):
        with ScriptedConnection() as scripted:
            log = scripted.ask()
            scripted.receive(*parts)
            assert log.is_over
            if status is None:
                assert isinstance(log.error, EngineFault)
            else:
                assert (log.error, log.status, log.body) == (None, status, body)
            assert scripted.is_reusable == is_reusable


async def test_each_piece_is_handed_on_as_soon_as_it_is_there() -> None:
    events = chat_events(["a", "b"])
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        scripted.receive(stream_head())
        assert log.status == 200 and log.data == []
        for num_events, event in enumerate(events, start=1):
            scripted.receive(chunk(event)[:-2])
            assert log.data == events[:num_events]
            scripted.receive(b"\r\n")
        scripted.receive(chunk(b"")[:-1])
        assert not log.is_over
        scripted.receive(b"\n")
        assert log.is_over and log.error is None


async def test_half_a_chunk_does_not_wait_for_its_other_half() -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        scripted.receive(stream_head() + b"100000\r\nabc", b"def")
        assert log.data == [b"abc", b"def"]


async def test_headers_come_as_they_were_and_without_trailers() -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        scripted.receive(head(103, ("Link", "a")) + head(200, ("X-A", "1"), CHUNKED, ("x-a", "2"), reason="Fine then"))
        scripted.receive(chunked([b"x"], trailers=b"X-Late: 1\r\n"))
        assert log.reason == b"Fine then"
        assert log.headers == [(b"X-A", b"1"), (b"Transfer-Encoding", b"chunked"), (b"x-a", b"2")]


async def test_until_close_ends_with_fin_alone() -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        scripted.receive(head(200) + b"hel", b"lo")
        assert log.body == b"hello" and not log.is_over
        scripted.end()
        assert log.is_over and log.error is None and scripted.num_free == 0


async def test_until_close_that_breaks_is_no_end() -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        scripted.receive(head(200) + b"hello")
        scripted.connection.connection_lost(ConnectionResetError("reset by peer"))
        assert isinstance(log.error, EngineFault)
        assert "in the middle of its answer" in str(log.error) and "reset by peer" in str(log.error)


@pytest.mark.parametrize(
    "framing", [head(200, ("Content-Length", "5")), head(200, CHUNKED), head(200, ("Content-Length", "0"))]
)
async def test_a_head_answer_has_no_body_whatever_its_framing_says(framing: bytes) -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask(is_head=True)
        scripted.receive(framing)
        assert log.is_over and log.error is None and log.body == b"" and log.header(b"content-length") != b""
        assert not scripted.is_reusable


@pytest.mark.parametrize("name", [name for name in ANSWERS if ANSWERS[name][1] not in (None, 204, 304)])
async def test_a_close_before_the_end_is_a_failure_at_every_byte(name: str) -> None:
    data = ANSWERS[name][0]
    for place in range(len(data)):
        with ScriptedConnection() as scripted:
            log = scripted.ask()
            if place:
                scripted.receive(data[:place])
            assert not log.is_over
            assert scripted.connection.has_bytes == (place > 0)
            scripted.end()
            assert isinstance(log.error, EngineFault)
            where = "in the middle of its answer" if place else "before it answered"
            assert where in str(log.error) and "http://engine:1" in str(log.error)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nA: b\r\n  folded\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\0c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloworld",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"<html>",
        b"\x16\x03\x01\x02\x00",
    ],
)
async def test_what_is_no_answer_fails_plainly(data: bytes) -> None:
    for parts in ([data], [data[place : place + 1] for place in range(len(data))]):
        with ScriptedConnection() as scripted:
            log = scripted.ask()
            scripted.receive(*parts)
            assert isinstance(log.error, EngineFault) and "http://engine:1" in str(log.error)
            assert scripted.transport.is_closing() and scripted.num_free == 0


HUGE = b"a" * 4096
ENDLESS = {
    "a header": (b"HTTP/1.1 200 OK\r\nA: ", HUGE),
    "a header's name": (b"HTTP/1.1 200 OK\r\n", HUGE),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 512),
    "a reason": (b"HTTP/1.1 200 ", HUGE),
    "interim answers": (b"", head(103, ("Link", "a")) * 64),
    "a chunk extension": (head(200, CHUNKED) + b"5;a=", HUGE),
    "zeros of a chunk's size": (head(200, CHUNKED), b"0" * 4096),
    "a trailer": (head(200, CHUNKED) + b"5\r\nhello\r\n0\r\nA: ", HUGE),
    "trailers": (head(200, CHUNKED) + b"0\r\n", b"A: b\r\n" * 512),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_whatever_is_not_body_is_bounded(name: str) -> None:
    first, more = ENDLESS[name]
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        num_bytes = 0
        if first:
            scripted.receive(first)
        while not log.is_over:
            scripted.receive(more)
            num_bytes += len(more)
            assert num_bytes <= MAX_ENGINE_HEAD_BYTES + len(more)
        assert isinstance(log.error, EngineFault)
        assert scripted.transport.is_closing()


async def test_a_body_is_not_bounded() -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        piece = b"x" * 600_000
        scripted.receive(stream_head(), *[chunk(piece)] * 20)
        assert not log.is_over and sum(map(len, log.data)) == 20 * len(piece)


async def test_a_head_just_below_the_bound_passes() -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        room = MAX_ENGINE_HEAD_BYTES - len(head(200, ("Content-Length", "5"), ("A", "")))
        data = head(200, ("Content-Length", "5"), ("A", "x" * room))
        scripted.receive(*[data[place : place + 1000] for place in range(0, len(data), 1000)], b"hello")
        assert log.is_over and log.error is None


# --- used again, or not


async def test_many_answers_on_one_connection() -> None:
    answers = [answer for answer in ANSWERS.values() if answer[3]]
    with ScriptedConnection() as scripted:
        for num_answers, (data, status, body, _) in enumerate(answers, start=1):
            log = scripted.ask(b"request")
            scripted.receive(data)
            assert (log.status, log.body, log.error) == (status, body, None)
            assert scripted.num_free == num_answers
        assert scripted.transport.written == [b"request"] * len(answers)


@pytest.mark.parametrize("more", [b"x", b"HTTP/1.1 200 OK\r\n", whole(b"another")])
@pytest.mark.parametrize("at_once", [True, False])
async def test_more_than_the_answer_ends_the_connection_not_the_answer(more: bytes, at_once: bool) -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        scripted.receive(*([whole(b"hello") + more] if at_once else [whole(b"hello"), more]))
        assert log.is_over and log.error is None and log.body == b"hello"
        assert scripted.transport.is_closing()


async def test_a_byte_that_nobody_asked_for_closes_an_idle_connection() -> None:
    with ScriptedConnection() as scripted:
        scripted.receive(whole(b"late", status=408))
        assert scripted.transport.is_closing()


async def test_an_answer_before_the_request_was_read_does_not_leave_half_a_request_behind() -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        scripted.transport.backlog_bytes = 1
        scripted.receive(whole(b"too large", status=413))
        assert log.status == 413 and log.error is None
        assert scripted.transport.is_closing() and scripted.num_free == 0


@pytest.mark.parametrize(
    ("value", "keep_alive_s"),
    [("timeout=5", 4.0), ("timeout=5, max=100", 4.0), ("max=1;Timeout = 10", 8.0), ("timeout=0", 0.0), ("max=5", None)],
)
async def test_the_engines_own_keep_alive_time_is_known(value: str, keep_alive_s: float | None) -> None:
    with ScriptedConnection() as scripted:
        scripted.ask()
        scripted.receive(whole(b"", ("Keep-Alive", value)))
        assert scripted.connection.keep_alive_s == keep_alive_s


async def test_the_kernel_looks_after_a_host_that_vanished_and_holds_nothing_back() -> None:
    with ScriptedConnection() as scripted:
        plain = scripted.transport.plain
        assert plain.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and plain.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY
        )
        assert plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == ENGINE_PROBE_S
        assert plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == ENGINE_LOST_S * 1_000


# --- backpressure, aborts, sinks


async def test_pause_and_resume_reach_the_transport_once() -> None:
    with ScriptedConnection() as scripted:
        scripted.ask()
        scripted.connection.resume()
        scripted.connection.pause()
        scripted.connection.pause()
        assert not scripted.transport.reads
        scripted.connection.resume()
        scripted.connection.resume()
        assert scripted.transport.reads


async def test_an_answer_that_ends_while_paused_leaves_a_connection_that_reads() -> None:
    with ScriptedConnection() as scripted:
        log = scripted.ask()
        scripted.connection.pause()
        scripted.receive(whole(b"hello"))  # What a read had brought before the pause.
        assert log.is_over and scripted.is_reusable and scripted.transport.reads
        scripted.connection.pause()
        assert scripted.transport.reads


class Rebel(ResponseLog):
    """Calls something in the middle of a read."""

    def __init__(self, connection: ScriptedConnection, when: str, error: Exception | None) -> None:
        super().__init__()
        self.scripted, self.when, self.raises = connection, when, error

    def _rebel(self, when: str) -> None:
        if when == self.when:
            if self.raises is not None:
                raise self.raises
            self.scripted.connection.abort()

    def on_head(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        super().on_head(status, reason, headers)
        self._rebel("head")

    def on_data(self, data: bytes) -> None:
        super().on_data(data)
        self._rebel("data")


@pytest.mark.parametrize("when", ["head", "data"])
@pytest.mark.parametrize("is_head", [False, True])
async def test_a_sink_may_abort_in_the_middle_of_a_read(when: str, is_head: bool) -> None:
    with ScriptedConnection() as scripted:
        sink = Rebel(scripted, when, None)
        scripted.connection.start([b"request"], sink, sink.over, is_head=is_head)
        scripted.receive(stream_head() + HELLO)
        if when == "data" and is_head:
            assert sink.is_over
        else:
            assert not sink.is_over and len(sink.data) == (when == "data")
        assert scripted.transport.is_closing() and scripted.num_free == 0
        scripted.connection.connection_lost(None)
        assert scripted.num_gone == 1


@pytest.mark.parametrize("when", ["head", "data"])
async def test_a_sink_that_raises_gets_its_own_error(when: str) -> None:
    error = ValueError("sink")
    with ScriptedConnection() as scripted:
        sink = Rebel(scripted, when, error)
        scripted.connection.start([b"request"], sink, sink.over, is_head=False)
        scripted.receive(stream_head() + HELLO)
        assert sink.error is error and scripted.transport.is_closing()


async def test_an_aborted_connection_that_is_made_later_is_closed() -> None:
    """A connect that was cancelled may still come through."""
    with ScriptedConnection() as scripted:
        late = ScriptedConnection()
        with late:
            scripted.connection.abort()
            scripted.connection.connection_made(late.transport)
            assert late.transport.is_closing()


async def test_after_the_end_nothing_more_is_heard() -> None:
    for first, then in pairwise([whole(b"a"), whole(b"b"), whole(b"c", CLOSE)]):
        with ScriptedConnection() as scripted:
            log = scripted.ask()
            scripted.receive(first)
            scripted.receive(then)
            scripted.end()
            assert log.is_over and log.error is None and scripted.num_gone == 1
