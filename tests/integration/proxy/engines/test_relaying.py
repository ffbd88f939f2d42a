"""What a client gets of an engine's answer: every byte, however it was framed and cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.support.answer_bytes import (
    LAST_CHUNK,
    chat_answer,
    chat_chunk,
    chat_events,
    chunk,
    chunked,
    event,
    head,
    json_answer,
    stream_head,
    usage,
    whole,
)
from tests.support.engine_proxy import EngineProxy, chat, engine_answers, engine_proxy
from tests.support.proxy_harness import events_of, text_of
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_engine import Step, close, never, pieces, reset, tell, when
from tests.support.seeds import seeded
from tests.support.waiting import eventually

TEXTS = ["Grüße ", "世界 ", "🙂🙃", "\r\n", " ende"]
SSE = ("content-type", "text/event-stream")
TOLD = usage(100, 7, 64)


async def streamed(fleet: EngineProxy, *steps: Step, **fields: Any) -> httpx.Response:
    """A chat as a stream, answered by these steps."""
    fleet.engines[0].script(*steps)
    return await fleet.chat(stream=True, **fields)


def wanted(line_end: bytes = b"\n") -> bytes:
    """The stream as it would be without the usage."""
    return b"".join(chat_events(TEXTS, line_end=line_end))


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("framing", ["chunk an event", "one chunk", "chunks of 7", "until close"])
async def test_streams_in_every_framing_line_end_and_cut(framing: str, line_end: bytes) -> None:
    rng = seeded(framing)
    events = chat_events(TEXTS, usage=TOLD, line_end=line_end)
    body = b"".join(events)
    parts = {
        "chunk an event": events,
        "one chunk": [body],
        "chunks of 7": [body[place : place + 7] for place in range(0, len(body), 7)],
        "until close": [],
    }[framing]
    async with engine_proxy() as fleet:
        for at in (range(1, 2), sorted(rng.sample(range(len(body)), 20)), range(1, len(body) * 2)):
            if framing == "until close":
                answer = await streamed(fleet, head(200, SSE, ("connection", "close")), pieces(body, at=at), close())
            else:
                answer = await streamed(fleet, stream_head(), pieces(chunked(parts), at=at))
            assert answer.status_code == 200
            assert answer.content == wanted(line_end)
        assert fleet.proxy.metric("prefixcache_cached_tokens_total", model="demo") == 3 * 64
        assert fleet.proxy.metric("prefixcache_prompt_tokens_total", model="demo") == 3 * 100
        assert fleet.proxy.metric("prefixcache_generation_tokens_total", model="demo") == 3 * 7


async def test_a_client_that_asks_for_usage_gets_the_engines_bytes() -> None:
    body = b"".join(chat_events(TEXTS, usage=TOLD))
    async with engine_proxy() as fleet:
        answer = await streamed(
            fleet, stream_head(), pieces(chunked([body]), at=range(0, 5_000, 3)), stream_options={"include_usage": True}
        )
        assert answer.content == body
        assert json.loads(fleet.asked()[0].body)["stream_options"] == {"include_usage": True}
        assert fleet.proxy.metric("prefixcache_cached_tokens_total", model="demo") == 64
        by_reuse = "prefixcache_time_to_first_token_by_reuse_seconds_count"
        assert fleet.proxy.metric(by_reuse, model="demo", reuse="most") == fleet.proxy.metric(by_reuse) == 1
        missed = "prefixcache_missed_tokens_total"
        assert fleet.proxy.metric(missed, model="demo", why="new") == fleet.proxy.metric(missed) == 36


async def test_null_is_not_zero() -> None:
    async with engine_proxy() as fleet:
        await streamed(fleet, stream_head(), chunked(chat_events(TEXTS, usage=usage(100, 7))))
        assert fleet.proxy.metric("prefixcache_prompt_tokens_total", model="demo") == 100
        assert fleet.proxy.metric("prefixcache_cached_tokens_total", model="demo") == 0
        assert fleet.proxy.metric("prefixcache_time_to_first_token_by_reuse_seconds_count") == 0, "nobody knows"
        assert fleet.proxy.metric("prefixcache_missed_tokens_total") == 0, "nor why"


async def test_an_event_of_600_kb() -> None:
    long = event(chat_chunk({"content": "x" * 600_000 + "🙂"}))
    body = long + b"".join(chat_events(["a"]))
    async with engine_proxy() as fleet:
        answer = await streamed(fleet, stream_head(), chunk(body), LAST_CHUNK)
        assert answer.content == body


@pytest.mark.parametrize("is_asked_by_client", [True, False])
async def test_each_event_is_passed_on_before_the_next_one_comes(is_asked_by_client: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if is_asked_by_client else {}
    go = asyncio.Event()
    first, *rest = chat_events(TEXTS)
    async with engine_proxy() as fleet:
        fleet.engines[0].script(stream_head(), chunk(first), when(go), chunked(rest))
        async with fleet.client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **options)) as answer:
            parts = answer.aiter_raw()
            assert await asyncio.wait_for(anext(parts), 5.0) == first
            go.set()
            assert b"".join([part async for part in parts]) == b"".join(rest)


async def test_a_client_of_http_1_0_gets_the_bytes_and_the_end_of_the_connection() -> None:
    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        fleet.engines[0].script(stream_head(), chunked(chat_events(TEXTS)))
        client.send(post("/v1/chat/completions", chat(stream=True), version="1.0"))
        status, headers = await client.head()
        assert status == 200 and "transfer-encoding" not in headers
        assert await client.read_all() == wanted()


async def test_whole_answers_keep_their_length_and_their_connection() -> None:
    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        for _ in range(3):
            content = chat_answer("hi 🙂", usage=TOLD)
            fleet.engines[0].script(content)
            client.send(post("/v1/chat/completions", chat()))
            status, headers = await client.head()
            body = content.partition(b"\r\n\r\n")[2]
            assert (status, headers["content-length"]) == (200, str(len(body)))
            assert await client.reader.readexactly(len(body)) == body
        assert fleet.proxy.metric("prefixcache_cached_tokens_total", model="demo") == 3 * 64


@pytest.mark.parametrize("status", [400, 404, 422, 429])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_engines_refusal_passes_with_status_and_body(status: int, is_stream: bool) -> None:
    refusal = json_answer({"error": {"message": "no", "x": "y"}}, ("retry-after", "7"), status=status)
    async with engine_proxy(engine_answers(), engine_answers()) as fleet:
        for engine in fleet.engines:
            engine.script(refusal)
        answer = await fleet.chat(stream=is_stream)
        assert (answer.status_code, answer.json()) == (status, {"error": {"message": "no", "x": "y"}})
        assert answer.headers["retry-after"] == "7"
        assert len(fleet.asked()) == 1


async def test_own_headers() -> None:
    async with engine_proxy() as fleet:
        fleet.engines[0].script(whole(b"{}", ("x-request-id", "engines"), ("set-cookie", "a=b")))
        answer = await fleet.client.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        assert fleet.asked()[0].header("x-request-id") == "mine"
        assert answer.headers["x-prefixcache-worker"] == fleet.link(fleet.engines[0]).engine_id
        assert answer.headers["x-prefixcache-hit-tokens"] == "0"
        assert answer.headers["x-prefixcache-reason"] == "no_prefix"
        assert "set-cookie" not in answer.headers


def _ending(how: str) -> Sequence[Step]:
    return {"reset": (reset(),), "close": (close(),), "clean end without [DONE]": (LAST_CHUNK,)}[how]


@pytest.mark.parametrize("how", ["reset", "close", "clean end without [DONE]"])
async def test_an_engine_that_dies_after_tokens_is_told_of_in_the_stream_which_never_ends_cleanly(how: str) -> None:
    events = chat_events(TEXTS, is_done=False, finish_reason=None)
    go = asyncio.Event()
    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        fleet.engines[0].script(stream_head(), chunk(b"".join(events)), when(go), *_ending(how))
        client.send(post("/v1/chat/completions", chat(stream=True)))
        await client.head()
        assert await client.chunk() == b"".join(events)
        go.set()
        last = await client.chunk()
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_fault"
        assert await client.read_all() == b"", "no last chunk"
        assert fleet.proxy.metric("prefixcache_request_errors_total", code="engine_fault") == 1
        assert fleet.proxy.metric("prefixcache_requests_total", code="502") == 1
        assert fleet.proxy.metric("prefixcache_prompt_tokens_total") == 0


async def test_an_engine_that_dies_within_an_event_leaves_no_half_event_behind() -> None:
    events = chat_events(TEXTS, is_done=False)
    async with engine_proxy() as fleet:
        fleet.engines[0].script(stream_head(), chunk(b"".join(events) + b'data: {"choi'), reset())
        got = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with fleet.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
                async for part in answer.aiter_raw():
                    got += part
        assert got.startswith(b"".join(events))
        assert "error" in events_of(got.decode())[-1]


async def test_a_stream_of_messages_tells_of_the_error_in_its_own_way() -> None:
    start = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    async with engine_proxy() as fleet:
        fleet.engines[0].script(stream_head(), chunk(start), reset())
        got = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with fleet.client.stream("POST", "/v1/messages", json=chat(stream=True, max_tokens=3)) as answer:
                async for part in answer.aiter_raw():
                    got += part
        assert got.startswith(start + b'event: error\ndata: {"type":"error","error":{"type":"api_error"')


async def test_a_whole_answer_that_breaks_off_breaks_off() -> None:
    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        fleet.engines[0].script(head(200, ("content-type", "application/json"), ("content-length", "9")), b"{", close())
        client.send(post("/v1/chat/completions", chat()))
        await client.head()
        assert await client.read_all() == b"{"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_ends_the_engines_request(is_stream: bool) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()
    async with engine_proxy() as fleet:
        begin: Sequence[Step] = (stream_head(), chunk(chat_events(["a"])[0])) if is_stream else ()
        engine = fleet.engines[0]
        engine.script(*begin, tell(asked), never())
        num_before = len(engine.connections)
        async with raw_connection(fleet.proxy.port) as client:
            client.send(post("/v1/chat/completions", chat(stream=is_stream)))
            await asyncio.wait_for(asked.wait(), 5.0)
            if is_stream:
                await client.head()
        await eventually(lambda: len(engine.connections) <= num_before)
        link = fleet.link(engine)
        await eventually(lambda: link.ledger.is_idle)
        assert (link.held.num_in_hand, link.held.num_waiting) == (0, 0)
        gone.set()


async def test_a_slow_reader_slows_the_engine_down_and_gets_every_byte() -> None:
    size, num_events = 256 * 1024, 200
    events = [event(chat_chunk({"content": chr(97 + place % 26) * size})) for place in range(num_events)]
    events.append(event("[DONE]"))
    written = 0

    async def send_all(connection: Any) -> None:
        nonlocal written
        for each in events:
            await connection.send(chunk(each))
            written += 1
        await connection.send(LAST_CHUNK)

    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port, receive_buffer_bytes=64 * 1024) as client:
        fleet.engines[0].script(stream_head(), send_all)
        client.send(post("/v1/chat/completions", chat(stream=True)))
        await client.head()
        first = await client.chunk()
        await asyncio.sleep(0.3)
        assert written < num_events * 3 // 4, "the engine is not read on for a client that does not read"
        assert first + b"".join(await client.chunks()) == b"".join(events)


async def test_a_proxy_that_stops_tells_those_who_are_still_served() -> None:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(engine_proxy())
        client = await stack.enter_async_context(raw_connection(running.proxy.port))
        first = chat_events(["a"])[0]
        running.engines[0].script(stream_head(), chunk(first), never())
        client.send(post("/v1/chat/completions", chat(stream=True)))
        await client.head()
        assert await client.chunk() == first
        stopping = asyncio.create_task(running.proxy.app.shutdown())
        assert b"closing its connections" in await client.chunk()
        assert await client.read_all() == b""
        await stopping


async def test_an_error_event_of_the_engine_passes_as_it_is() -> None:
    body = b"".join(chat_events(["a"], is_done=False)) + event({"error": {"message": "oom"}}) + event("[DONE]")
    async with engine_proxy() as fleet:
        answer = await streamed(fleet, stream_head(), chunk(body), LAST_CHUNK)
        assert answer.content == body
        assert text_of(events_of(answer.text)) == "a"
