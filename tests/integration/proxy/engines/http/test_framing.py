"""Answers in every cut over a real socket, and as another client reads them."""

from __future__ import annotations

import http.client
import io
import socket
from random import Random
from typing import cast

import pytest

from prefixcache.errors import EngineFault
from proxy.engines.http_message import EngineRequest
from proxy.engines.http_pool import HttpPool
from tests.support.answer_bytes import chat_events, chat_stream, chunk, chunked, error_event, head, stream_head
from tests.support.engine_pool import answer, ask, engine_and_pool
from tests.support.response_log import ResponseLog
from tests.support.scripted_engine import ScriptedEngine, close, each, pieces, reset
from tests.support.seeds import seeded

NUM_ANSWERS = 300


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_cut_at_every_byte(line_end: bytes) -> None:
    texts = ["é", "字", "🙂", 'a"b\\']
    data = chat_stream(texts, line_end=line_end)
    body = b"".join(chat_events(texts, line_end=line_end))
    async with engine_and_pool() as (engine, pool):
        for place in range(1, len(data), 3):
            engine.script(pieces(data, at=[place]))
            assert (await answer(pool)).body == body
        engine.script(pieces(data, at=range(len(data))))
        log = await answer(pool)
        assert log.body == body and len(log.data) > len(body) / 2
        assert engine.num_accepted == 1


async def test_an_event_of_600_kb_in_one_chunk_and_in_many() -> None:
    event = b'data: {"choices":[{"delta":{"content":"' + b"x" * 600_000 + b'"}}]}\n\n'
    async with engine_and_pool() as (engine, pool):
        engine.script(stream_head() + chunked([event]))
        assert (await answer(pool)).body == event
        engine.script(
            stream_head(), each([chunk(event[at : at + 1_000]) for at in range(0, len(event), 1_000)]), chunk(b"")
        )
        assert (await answer(pool)).body == event


@pytest.mark.parametrize("is_reset", [False, True])
async def test_an_end_after_some_tokens_is_a_failure_with_all_that_came(is_reset: bool) -> None:
    events = chat_events(["a", "b"], finish_reason=None, is_done=False)
    async with engine_and_pool() as (engine, pool):
        engine.script(stream_head(), each([chunk(event) for event in events]), reset() if is_reset else close())
        handle, log = await ask(pool)
        with pytest.raises(EngineFault, match="in the middle of its answer"):
            await log.ended()
        assert log.body == b"".join(events) and handle.began


async def test_an_error_event_after_some_tokens_is_data_like_any_other() -> None:
    events = [*chat_events(["a"], finish_reason=None, is_done=False), error_event("out of memory")]
    async with engine_and_pool() as (engine, pool):
        engine.script(stream_head(), each([chunk(event) for event in events]), chunk(b""))
        assert (await answer(pool)).data == events


def _body(random: Random) -> bytes:
    return random.randbytes(random.choice((0, 1, 7, 100, 5_000)))


def _chunks(random: Random, body: bytes) -> bytes:
    parts = []
    while body:
        length = random.choice((1, 2, 17, 300, len(body)))
        extension = random.choice((b"", b"", b";a", b';a="b;c"'))
        parts.append(chunk(body[:length], extension=extension))
        body = body[length:]
    trailers = random.choice((b"", b"X-T: 1\r\n", b"A: b\r\nC: d\r\n"))
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


def _random_answer(random: Random) -> tuple[bytes, bytes, str, bool]:
    """Interim answers, the answer, the method it is for, whether it ends by the close."""
    interim = b"".join(
        random.choice((head(100, reason="Continue"), head(103, ("Link", "x"))))
        for _ in range(random.choice((0, 0, 0, 1, 3)))
    )
    status = random.choice((200, 200, 200, 201, 204, 304, 400, 429, 500, 503))
    method = random.choice(("POST", "POST", "GET", "HEAD"))
    headers = [(f"X-{random.randrange(9)}", random.choice(("", "a", "b c", "é"))) for _ in range(random.randrange(6))]
    if random.random() < 0.2:
        headers.append(("Connection", random.choice(("close", "keep-alive"))))
    body = _body(random)
    has_body = method != "HEAD" and status not in (204, 304)
    framing = random.choice(("length", "chunked", "close")) if has_body else "length"
    if framing == "length":
        headers.append(("content-length", str(len(body))))
        sent = body
    elif framing == "chunked":
        headers.append(("Transfer-Encoding", "chunked"))
        sent = _chunks(random, body)
    else:
        sent = body
    random.shuffle(headers)
    reason = random.choice(("OK", "Not so good", ""))
    first = head(status, *headers, reason=reason)
    return interim, first + (sent if has_body else b""), method, framing == "close" and has_body


class _Bytes:
    """A socket to http.client."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def _reference(data: bytes, method: str) -> tuple[int, str, list[tuple[str, str]], bytes]:
    response = http.client.HTTPResponse(cast(socket.socket, _Bytes(data)), method=method)
    response.begin()
    body = response.read()
    return response.status, response.reason, response.getheaders(), body


async def _through_pool(
    engine: ScriptedEngine, pool: HttpPool, data: bytes, method: str, cuts: list[int], ends: bool
) -> tuple[int | None, str, list[tuple[str, str]], bytes]:
    engine.script(pieces(data, at=cuts), *((close(),) if ends else ()))
    log = ResponseLog()
    await pool.send(EngineRequest(method=method, target="/"), log)
    await log.ended()
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in log.headers]
    return log.status, log.reason.decode(), headers, log.body


async def test_random_answers_are_what_http_client_reads() -> None:
    random = seeded("random answers")
    async with engine_and_pool() as (engine, pool):
        for _ in range(NUM_ANSWERS):
            interim, data, method, ends = _random_answer(random)
            cuts = sorted(random.randrange(len(interim + data)) for _ in range(random.choice((0, 1, 3, 20))))
            expected = _reference(data, method)
            assert await _through_pool(engine, pool, interim + data, method, cuts, ends) == expected
        assert engine.num_accepted < NUM_ANSWERS


async def test_a_script_that_reads_no_further_than_its_request() -> None:
    """Requests one after the other, each with its own body: framing of requests holds, too."""
    random = seeded("request bodies")
    async with engine_and_pool() as (engine, pool):
        bodies = [_body(random) for _ in range(50)]
        engine.answer = lambda request: (chat_stream([str(len(request.body))]),)
        for body in bodies:
            await answer(pool, body)
        assert [request.body for request in engine.requests] == bodies and engine.num_accepted == 1
