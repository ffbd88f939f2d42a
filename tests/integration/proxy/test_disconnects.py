"""A client that leaves takes its request with it, whatever the request was waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

import pytest

from prefixcache.index.base import Match
from proxy.sse_stream import SseStream
from tests.support.fake_worker import FakeWorker, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, body, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.seeds import seeded
from tests.support.waiting import eventually

PATH = "/v1/chat/completions"
Phase = Literal["waiting", "accepted", "prefill", "decode", "stopping"]


async def _nothing_left(proxy: RunningProxy, num_left: int) -> None:
    await eventually(lambda: proxy.metric("prefixcache_requests_total", code="499") == num_left)
    assert proxy.metric("prefixcache_num_requests_waiting") == 0
    assert proxy.metric("prefixcache_num_requests_running") == 0


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["waiting", "accepted", "prefill", "decode", "stopping"])
async def test_a_client_that_leaves_aborts_its_request(
    store: MemoryStore, phase: Phase, stream: bool, how: str
) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        worker.answers_aborts = phase != "stopping"
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body(stream=stream, stop="stop")))
            frame = await worker.next_generate()
            if phase != "waiting":
                worker.accepted(frame.id)
            if phase in ("prefill", "decode", "stopping"):
                worker.started(frame.id)
                await eventually(lambda: proxy.metric("prefixcache_num_requests_running") == 1)
            if phase in ("decode", "stopping"):
                worker.step(frame.id, token_ids("hello" if phase == "decode" else "hello stop"))
                if stream:
                    await connection.head()
                    await connection.chunk()
            if phase == "stopping":
                await eventually(lambda: worker.aborts == [frame.id])
            if how == "rst":
                connection.reset()
        await eventually(lambda: worker.aborts[-1:] == [frame.id])
        await _nothing_left(proxy, 1)
        assert proxy.metric("prefixcache_prompt_tokens_total") == 0, "not a completed request"


async def test_a_half_closed_connection_counts_as_left(store: MemoryStore) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body()))
            frame = await worker.next_generate()
            connection.writer.write_eof()
            await eventually(lambda: worker.aborts == [frame.id])
            await _nothing_left(proxy, 1)


async def test_a_client_that_leaves_while_the_index_is_asked(store: MemoryStore) -> None:
    asked = asyncio.Event()

    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        index = store.index(worker.record.namespace)

        async def never(hashes: object, **_: object) -> Match:
            asked.set()
            await asyncio.Event().wait()
            return Match()

        index.match = never  # type: ignore[method-assign]  # an index that hangs
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body(messages=[{"role": "user", "content": "word " * 200}])))
            await asked.wait()
        await _nothing_left(proxy, 1)
        assert worker.generates == []


async def test_a_client_that_leaves_while_its_body_arrives(store: MemoryStore) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body())[:-5])
            await connection.writer.drain()
        await _nothing_left(proxy, 1)
        assert worker.generates == []


async def test_a_client_that_leaves_as_its_answer_begins(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = SseStream.begin

    async def begin_too_late(self: SseStream, headers: Mapping[str, str]) -> None:
        transport = self._request.transport
        assert transport is not None
        transport.abort()
        await begin(self, headers)

    monkeypatch.setattr(SseStream, "begin", begin_too_late)
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body(stream=True)))
            frame = await worker.next_generate()
            worker.step(frame.id, token_ids("hello"))
            await _nothing_left(proxy, 1)
            assert await connection.read_all() == b""
        await eventually(lambda: worker.aborts == [frame.id])
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_many_clients_that_leave_at_random_leave_nothing_behind(store: MemoryStore) -> None:
    random = seeded("clients that leave")
    text = token_ids("hello world " * 5)

    async def one(proxy: RunningProxy) -> None:
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body(stream=random.random() < 0.5)))
            await asyncio.sleep(random.random() * 0.05)
            if random.random() < 0.5:
                connection.reset()

    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()

        async def answer() -> None:
            while True:
                frame = await worker.next_generate(60)
                for act in (worker.started, lambda i: worker.step(i, text), worker.end)[: random.randrange(4)]:
                    if frame.id in worker.aborts:
                        break
                    act(frame.id)
                    await asyncio.sleep(0)

        answering = asyncio.create_task(answer())
        await asyncio.gather(*(one(proxy) for _ in range(100)))
        await eventually(lambda: proxy.metric("prefixcache_requests_total") == 100)
        await eventually(lambda: worker.num_active == 0)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        assert proxy.metric("prefixcache_num_requests_waiting") == 0
        assert proxy.metric("prefixcache_num_requests_running") == 0
        frames = asyncio.create_task(proxy.chat())
        frame = await worker.next_generate()
        while frame.id in worker.aborts:  # one that left before it was looked at
            frame = await worker.next_generate()
        worker.step(frame.id, text)
        worker.end(frame.id)
        assert (await frames).status_code == 200
