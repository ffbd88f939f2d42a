"""Large bodies wait for room and small ones for nothing; no room is lost, whatever becomes of who has it."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import proxy.request_body
from prefixcache.limits import AWAY_RETRY_AFTER_S, LARGE_BODY_BYTES, MAX_BODY_BYTES, OFFLOAD_BODY_BYTES
from prefixcache.rendering import engine_prompt
from proxy.app import BODIES
from proxy.body_room import BodyRoom
from tests.support.answer_bytes import chat_answer, chat_events, chunk, chunked, stream_head, whole
from tests.support.engine_proxy import MODEL, EngineProxy, chat, engine_answers, engine_proxy
from tests.support.fake_worker import FakeWorker, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, body, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_engine import ReceivedRequest, tell, when
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
LARGE = "word " * (LARGE_BODY_BYTES // 5)
MEDIUM = "word " * (OFFLOAD_BODY_BYTES // 5)


def room(proxy: RunningProxy, kind: str = "large") -> BodyRoom:
    found: BodyRoom = getattr(proxy.app[BODIES], kind)
    return found


@asynccontextmanager
async def one_large_body_fits() -> AsyncIterator[tuple[EngineProxy, asyncio.Event]]:
    """The engine keeps a large chat waiting until the event is set."""
    go = asyncio.Event()

    def answer(request: ReceivedRequest) -> Any:
        return (when(go), chat_answer("long")) if len(request.body) >= LARGE_BODY_BYTES else (chat_answer("short"),)

    async with engine_proxy(engine_answers(then=answer)) as fleet:
        room(fleet.proxy)._most_bytes = int(1.5 * len(LARGE))
        yield fleet, go


async def test_a_large_body_waits_for_room_and_others_do_not() -> None:
    async with one_large_body_fits() as (fleet, go):
        large = [asyncio.create_task(fleet.chat(LARGE)) for _ in range(3)]
        await eventually(lambda: len(fleet.asked()) == 1 and room(fleet.proxy).num_waiting == 2)
        for content in (b'{"input":"hi"}', json.dumps({"input": MEDIUM}).encode()):
            assert (await fleet.client.post("/v1/embeddings", content=content)).status_code == 200
        assert room(fleet.proxy).num_waiting == 2
        go.set()
        assert [(await answer).status_code for answer in large] == [200] * 3
        assert room(fleet.proxy).num_bytes == room(fleet.proxy, "medium").num_bytes == 0


async def test_medium_ones_wait_for_each_other() -> None:
    async with one_large_body_fits() as (fleet, _):
        medium = room(fleet.proxy, "medium")
        medium._most_bytes = medium.num_bytes = OFFLOAD_BODY_BYTES * 2
        waiting = asyncio.create_task(fleet.chat(MEDIUM))
        await eventually(lambda: medium.num_waiting == 1)
        assert (await fleet.chat("hello")).status_code == 200
        medium.give_back(OFFLOAD_BODY_BYTES * 2)
        assert (await waiting).status_code == 200


async def test_without_room_in_time_it_is_told_when_to_come_again() -> None:
    async with one_large_body_fits() as (fleet, go):
        room(fleet.proxy)._patience_s = 0.05
        large = asyncio.create_task(fleet.chat(LARGE))
        await eventually(lambda: len(fleet.asked()) == 1)
        refused = await fleet.chat(LARGE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, str(AWAY_RETRY_AFTER_S))
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        go.set()
        assert (await large).status_code == 200
        assert (await fleet.chat(LARGE)).status_code == 200


@pytest.fixture
def held_bytes() -> Iterator[Callable[[], int]]:
    """How much more memory is in use than before."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/audio/transcriptions"])
async def test_it_is_held_as_bytes_alone_and_not_once_its_answer_has_begun(
    path: str, held_bytes: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_prompt, "MAX_MATCH_BLOCKS", 16)  # The index in this process is not what is measured.
    came, go = asyncio.Event(), asyncio.Event()
    data = post(path, chat(LARGE + "🙂", stream=True))
    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        fleet.engines[0].script(
            tell(came), when(go), stream_head(), chunk(chat_events(["a"])[0]), when(asyncio.Event())
        )
        before = held_bytes()
        client.send(data)
        await came.wait()
        # The engine holds it, too, while it answers.
        await eventually(lambda: held_bytes() - before < 2.4 * len(data))
        assert room(fleet.proxy).num_bytes > LARGE_BODY_BYTES
        go.set()
        assert (await client.head())[0] == 200
        assert room(fleet.proxy).num_bytes == 0
        await eventually(lambda: held_bytes() - before < 1.4 * len(data))


@pytest.mark.parametrize("stream", [False, True])
async def test_another_engine_gets_a_large_body_whole_after_a_fault(stream: bool) -> None:
    answers = iter(
        [whole(b"{}", status=503), stream_head() + chunked(chat_events(["a"])) if stream else chat_answer("a")]
    )

    def next_answer(request: ReceivedRequest) -> Any:
        return (next(answers),)

    async with engine_proxy(*[engine_answers(then=next_answer)] * 2) as fleet:
        answer = await fleet.chat(LARGE, **({"stream": True} if stream else {}))
        assert answer.status_code == 200
        sent, again = fleet.asked()
        assert sent.body == again.body
        assert json.loads(sent.body)["messages"] == chat(LARGE)["messages"]
        assert ("stream_options" in json.loads(sent.body)) == stream


async def test_one_that_leaves_gives_its_room_back() -> None:
    async with one_large_body_fits() as (fleet, _):
        for content in (post(CHAT, chat(LARGE)), post(CHAT, chat(LARGE))[:-10]):
            async with raw_connection(fleet.proxy.port) as client:
                client.send(content)
                await eventually(lambda: room(fleet.proxy).num_bytes > 0)
                client.reset()
            await eventually(lambda: room(fleet.proxy).num_bytes == 0)


@pytest.mark.parametrize("coding", ["chunked", "gzip"])
async def test_a_length_that_is_not_told_counts_as_the_longest_until_it_is_there(coding: str) -> None:
    async with one_large_body_fits() as (fleet, go):
        large = room(fleet.proxy)
        large._most_bytes = MAX_BODY_BYTES
        data = json.dumps(chat(LARGE)).encode()
        packed = gzip.compress(data)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n"
        async with raw_connection(fleet.proxy.port) as client:
            if coding == "chunked":
                client.send(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk(data[:-1]))
                rest = chunk(data[-1:]) + chunk(b"")
            else:
                client.send(f"{head}Content-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode())
                client.send(packed[:-1])
                rest = packed[-1:]
            await eventually(lambda: large.num_bytes == MAX_BODY_BYTES)
            client.send(rest)
            await eventually(lambda: large.num_bytes == len(data))
            go.set()
            assert (await client.head())[0] == 200
        assert fleet.asked()[0].body == data


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_body_that_holds_room_must_come_in_time(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.request_body, "BODY_GRACE_S", 0.1)
    monkeypatch.setattr(proxy.request_body, "BODY_LEAST_BYTES_PER_S", 1 << 40)
    async with one_large_body_fits() as (fleet, _), raw_connection(fleet.proxy.port) as client:
        room(fleet.proxy)._most_bytes = MAX_BODY_BYTES
        content = post(CHAT, chat(LARGE))[:-10]
        if not is_told:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            content = head + chunk(content.partition(b"\r\n\r\n")[2])
        client.send(content)
        status, headers = await client.head()
        answer = json.loads(await client.reader.readexactly(int(headers["content-length"])))
        assert (status, answer["error"]["code"]) == (408, "request_timeout")
        assert room(fleet.proxy).num_bytes == 0 and fleet.asked() == []


async def test_own_workers_answer_without_the_body() -> None:
    store = MemoryStore()
    async with FakeWorker.open(store) as worker, running_proxy(store) as running:
        await running.ready()
        asking = asyncio.create_task(
            running.client.post(CHAT, content=json.dumps(body()).encode() + b" " * LARGE_BODY_BYTES)
        )
        frame = await worker.next_generate()
        assert room(running).num_bytes == 0
        worker.step(frame.id, token_ids("hi"))
        worker.end(frame.id)
        assert (await asking).status_code == 200


async def test_one_proxy_of_both_kinds_reads_a_body_for_either() -> None:
    store = MemoryStore()
    async with FakeWorker.open(store, script=says("hi")), engine_proxy(store=store) as fleet:
        await fleet.proxy.ready()
        for model in (MODEL, "tiny"):
            content = json.dumps(body(model=model)).encode() + b" " * LARGE_BODY_BYTES
            assert (await fleet.client.post(CHAT, content=content)).status_code == 200
        assert room(fleet.proxy).num_bytes == 0
