"""How a stream looks on the wire, and what becomes of a client that does not read it."""

from __future__ import annotations

import asyncio
import json

import pytest

from prefixcache.limits import MAX_STREAM_BACKLOG_BYTES
from prefixcache.protocol import Generate
from tests.support.fake_worker import FakeWorker, Script, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import body, events_of, running_proxy, text_of
from tests.support.raw_http import post, raw_connection
from tests.support.tiny_tokenizer import tiny_tokenizer_files
from tests.support.waiting import eventually

PATH = "/v1/chat/completions"


async def test_http_1_1_is_chunked_and_the_connection_goes_on(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hello world")), running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            for _ in range(3):
                connection.send(post(PATH, body(stream=True)))
                status, headers = await connection.head()
                assert status == 200
                assert headers["transfer-encoding"] == "chunked"
                assert "content-length" not in headers
                events = events_of(b"".join(await connection.chunks()).decode())
                assert text_of(events) == "hello world" and events[-1] == "[DONE]"
            connection.send(post(PATH, body()))
            status, headers = await connection.head()
            assert status == 200 and headers["content-type"] == "application/json; charset=utf-8"


async def test_http_1_0_is_plain_and_ends_with_the_connection(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hello world")), running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body(stream=True), version="1.0"))
            status, headers = await connection.head()
            assert status == 200
            assert "transfer-encoding" not in headers
            events = events_of((await connection.read_all()).decode())
            assert text_of(events) == "hello world" and events[-1] == "[DONE]"


async def test_a_token_is_sent_when_it_comes(store: MemoryStore) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body(stream=True)))
            frame = await worker.next_generate()
            worker.started(frame.id)
            for place, token_id in enumerate(token_ids("a b c")):
                worker.step(frame.id, [token_id])
                if place == 0:
                    await connection.head()
                event = await connection.chunk()
                assert event.endswith(b"\n\n")
            worker.end(frame.id)
            assert (await connection.chunk()).endswith(b"data: [DONE]\n\n")
            assert await connection.chunk() == b""


async def test_characters_are_never_cut(store: MemoryStore) -> None:
    """Each token is one byte of a character of four."""
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        ids = token_ids("\N{BALLOON}\N{BALLOON}")
        assert len(ids) == 8
        streaming = asyncio.create_task(proxy.events(max_tokens=7))
        frame = await worker.next_generate()
        for token_id in ids[:-1]:
            worker.step(frame.id, [token_id])
        worker.end(frame.id, "length")
        events = await streaming
    assert text_of(events).startswith("\N{BALLOON}\N{REPLACEMENT CHARACTER}")
    contents = [e["choices"][0]["delta"].get("content") for e in events[:-1]]
    assert next(c for c in contents if c) == "\N{BALLOON}"


async def test_a_client_that_does_not_read_is_cut_and_its_request_aborted(store: MemoryStore) -> None:
    long_token = "x" * 1000
    files = tiny_tokenizer_files(added_tokens=[long_token])
    ids = token_ids(long_token, files) * 50
    async with FakeWorker.open(store, files=files) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port, receive_buffer_bytes=4096) as connection:
            connection.send(post(PATH, body(stream=True)))
            frame = await worker.next_generate()
            worker.started(frame.id)
            sent_bytes = 0
            while not worker.aborts:
                worker.step(frame.id, ids)
                sent_bytes += 1000 * len(ids)
                await asyncio.sleep(0)
                assert sent_bytes < 64 * MAX_STREAM_BACKLOG_BYTES
            assert worker.aborts == [frame.id]
            assert sent_bytes > MAX_STREAM_BACKLOG_BYTES
            await eventually(lambda: proxy.metric("prefixcache_requests_total", code="499") == 1)
            assert proxy.metric("prefixcache_num_requests_running") == 0


async def test_a_client_that_does_not_read_the_beginning_is_cut_and_its_request_aborted(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.sse_stream.CLIENT_DRAIN_S", 0.3)
    long_token = "x" * 1000
    files = tiny_tokenizer_files(added_tokens=[long_token])
    echoed = {"model": "tiny", "prompt": long_token * 100, "n": 128, "echo": True, "stream": True, "max_tokens": 4}
    async with FakeWorker.open(store, files=files) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port, receive_buffer_bytes=4096) as connection:
            connection.send(post("/v1/completions", echoed))
            frames = [await worker.next_generate() for _ in range(128)]
            worker.step(frames[0].id, token_ids("hi", files))
            await eventually(lambda: len(worker.aborts) == 128)
        await eventually(lambda: proxy.metric("prefixcache_requests_total", code="499") == 1)
        assert proxy.metric("prefixcache_num_requests_running") == 0
        assert {frame.id for frame in frames} == set(worker.aborts)


async def test_a_client_that_reads_late_but_all_gets_all(store: MemoryStore) -> None:
    text = "lorem ipsum dolor " * 2000

    def script(frame: Generate) -> Script:
        return Script(ids=token_ids(text), ids_a_step=50)

    async with FakeWorker.open(store, script=script, max_model_len=10**6) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port, receive_buffer_bytes=4096) as connection:
            connection.send(post(PATH, body(stream=True)))
            await worker.next_generate()
            await eventually(lambda: worker.num_active == 0)
            await connection.head()
            events = events_of(b"".join(await connection.chunks()).decode())
    assert text_of(events) == text


async def test_pipelined_requests_are_answered_in_order(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hello")), running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body(stream=True)) + post(PATH, body(), headers="Connection: close\r\n"))
            await connection.head()
            await connection.chunks()
            await connection.head()
            whole = json.loads(await connection.read_all())
            assert whole["choices"][0]["message"]["content"] == "hello"
