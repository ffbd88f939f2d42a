"""A proxy that is told to end: /ready turns first, then nobody new is let in, and what is in hand goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.app import DEPARTURE, PROXY_ID
from tests.support.fake_worker import FakeWorker, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, body, running_proxy
from tests.support.raw_http import RawConnection, post, raw_connection
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
LONG_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A proxy on its way out."""

    proxy: RunningProxy
    gone: asyncio.Task[None]

    def tell_again(self) -> None:
        self.proxy.app[DEPARTURE].tell()


@asynccontextmanager
async def staying(
    store: MemoryStore, *, drain_delay_s: float = 0.0, drain_s: float = LONG_S
) -> AsyncIterator[tuple[RunningProxy, AsyncExitStack]]:
    """A proxy that is ready, and what its end stands in."""
    async with AsyncExitStack() as end:
        proxy = await end.enter_async_context(running_proxy(store, drain_delay_s=drain_delay_s, drain_s=drain_s))
        await proxy.ready()
        yield proxy, end


@asynccontextmanager
async def told(proxy: RunningProxy, end: AsyncExitStack) -> AsyncIterator[Leaving]:
    """Leaving; when the block is left, it is gone within seconds."""
    gone = asyncio.create_task(end.pop_all().aclose())
    await eventually(lambda: proxy.app[DEPARTURE].is_leaving)
    yield Leaving(proxy=proxy, gone=gone)
    await asyncio.wait_for(gone, 10)


async def ask(connection: RawConnection, request: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of an answer that is no stream."""
    connection.send(request)
    status, headers = await connection.head()
    return status, headers, json.loads(await connection.reader.readexactly(int(headers["content-length"])))


def probe(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def begin_stream(worker: FakeWorker, connection: RawConnection) -> str:
    """The id of a generation whose first token has reached the client."""
    connection.send(post(CHAT, body(stream=True)))
    request_id = (await worker.next_generate()).id
    worker.step(request_id, token_ids("hi"))
    assert (await connection.head())[0] == 200
    return request_id


async def test_ready_turns_first_while_requests_are_still_taken(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, script=says("hi")),
        staying(store, drain_delay_s=LONG_S) as (proxy, end),
        raw_connection(proxy.port) as old,
    ):
        status, headers, _ = await ask(old, post(CHAT, body()))
        assert status == 200 and "connection" not in headers
        ready = await proxy.client.get("/ready")
        process = ready.headers["x-prefixcache-proxy"]
        assert ready.status_code == 200 and process == proxy.app[PROXY_ID]
        assert (await proxy.client.get("/health")).json()["status"] == "ok"
        async with (
            told(proxy, end) as leaving,
            raw_connection(proxy.port) as new,
            raw_connection(proxy.port) as balancer,
        ):
            status, headers, told_to_balancer = await ask(balancer, probe("/ready"))
            assert (status, headers["connection"]) == (503, "close")
            assert headers["x-prefixcache-proxy"] == process, "it takes leave itself"
            assert "shutting down" in told_to_balancer["error"]["message"] and told_to_balancer["workers_ready"] == 1
            async with raw_connection(proxy.port) as watcher:
                status, _, health = await ask(watcher, probe("/health"))
                assert (status, health["status"]) == (200, "leaving")
            for connection in (old, new):
                status, headers, answer = await ask(connection, post(CHAT, body()))
                assert status == 200 and answer["choices"][0]["message"]["content"] == "hi"
                assert headers["connection"] == "close", "its next request goes elsewhere"
                assert await connection.read_all() == b""
            assert not leaving.gone.done()
            leaving.tell_again()


async def test_what_is_in_hand_goes_on_and_what_comes_is_refused(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store) as worker,
        staying(store) as (proxy, end),
        raw_connection(proxy.port) as streaming,
        raw_connection(proxy.port) as waiting,
        raw_connection(proxy.port) as kept,
        raw_connection(proxy.port) as watching,
    ):
        assert (await ask(kept, probe("/health")))[0] == 200
        stream_id = await begin_stream(worker, streaming)
        waiting.send(post(CHAT, body()))
        whole_id = (await worker.next_generate()).id
        async with told(proxy, end) as leaving:
            await eventually(lambda: proxy.app[DEPARTURE]._refuses)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", proxy.port)
            status, headers, refused = await ask(kept, post(CHAT, body()))
            assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "5")
            assert refused["error"]["code"] == "unavailable" and "shutting down" in refused["error"]["message"]
            assert await kept.read_all() == b""
            assert (await ask(watching, probe("/ready")))[0] == 503, "whoever has a connection is still told"
            assert not leaving.gone.done() and len(worker.generates) == 2
            for request_id in (stream_id, whole_id):
                worker.step(request_id, token_ids(" you"))
                worker.end(request_id)
            assert b" you" in b"".join(events := await streaming.chunks()) and events[-1].endswith(b"[DONE]\n\n")
            status, headers = await waiting.head()
            assert (status, headers["connection"]) == (200, "close")
    assert worker.aborts == []


async def test_one_without_requests_is_gone_at_once(store: MemoryStore) -> None:
    async with FakeWorker.open(store), staying(store) as (proxy, end), raw_connection(proxy.port) as kept:
        assert (await ask(kept, probe("/health")))[0] == 200
        async with told(proxy, end):
            assert await kept.read_all() == b""


async def test_probes_do_not_hold_it(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store) as worker,
        staying(store) as (proxy, end),
        raw_connection(proxy.port) as streaming,
    ):
        async with raw_connection(proxy.port) as watching:
            request_id = await begin_stream(worker, streaming)
            assert proxy.app[DEPARTURE]._num_in_hand == 1
            assert (await ask(watching, probe("/health")))[0] == 200
            assert proxy.app[DEPARTURE]._num_in_hand == 1
        async with told(proxy, end):
            worker.end(request_id)
            await streaming.chunks()


@pytest.mark.parametrize("how", ["grace over", "told again"])
async def test_a_stream_that_takes_longer_is_told_in_its_stream(store: MemoryStore, how: str) -> None:
    drain_s = 0.2 if how == "grace over" else LONG_S
    async with (
        FakeWorker.open(store) as worker,
        staying(store, drain_s=drain_s) as (proxy, end),
        raw_connection(proxy.port) as streaming,
        raw_connection(proxy.port) as waiting,
    ):
        stream_id = await begin_stream(worker, streaming)
        waiting.send(post(CHAT, body()))
        whole_id = (await worker.next_generate()).id
        async with told(proxy, end) as leaving:
            if how == "told again":
                leaving.tell_again()
            *_, last = await streaming.chunks()
            assert b"the proxy is shutting down" in last and b"[DONE]" not in last
            status, headers = await waiting.head()
            assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "5")
        await eventually(lambda: sorted(worker.aborts) == sorted([stream_id, whole_id]))


async def test_a_client_that_leaves_is_in_nobodys_hand_any_more(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store) as worker,
        staying(store) as (proxy, end),
        raw_connection(proxy.port) as streaming,
    ):
        await begin_stream(worker, streaming)
        async with told(proxy, end) as leaving:
            assert not leaving.gone.done()
            streaming.reset()


async def test_told_again_during_the_delay_it_does_not_wait(store: MemoryStore) -> None:
    async with FakeWorker.open(store), staying(store, drain_delay_s=LONG_S) as (proxy, end):
        async with told(proxy, end) as leaving:
            assert not proxy.app[DEPARTURE]._refuses
            leaving.tell_again()
