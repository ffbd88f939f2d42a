"""What clients see when the only worker breaks: there is no other one to answer, or to go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from prefixcache.protocol import FailKind
from tests.support.fake_worker import FakeWorker, Script, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import running_proxy, text_of
from tests.support.waiting import eventually


def _drop(worker: FakeWorker, _request_id: str) -> None:
    worker.drop()


def _garbage(worker: FakeWorker, _request_id: str) -> None:
    worker.send_bytes(b"\xff\xff\xff\xff")


def _fault(worker: FakeWorker, request_id: str) -> None:
    worker.fail(request_id, "worker_fault", "tensor of doom at 0x7f")


def _skip(worker: FakeWorker, request_id: str) -> None:
    worker.step(request_id, token_ids("x"), index=999)


def _impossible_id(worker: FakeWorker, request_id: str) -> None:
    worker.end(request_id, "aborted")


FAULTS = [
    (_drop, 503, "unavailable"),
    (_garbage, 503, "unavailable"),
    (_fault, 502, "worker_fault"),
    (_skip, 502, "worker_fault"),
    (_impossible_id, 502, "worker_fault"),
]
"""One that was lost with its stream may come back, and is waited for if there is time; one that failed it is not."""


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("started", [True, False])
async def test_before_the_first_token_it_has_its_status(
    store: MemoryStore, fault: Callable[[FakeWorker, str], None], status: int, code: str, stream: bool, started: bool
) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store, held_s=0.0) as proxy:
        await proxy.ready()
        asking = asyncio.create_task(proxy.chat(stream=stream))
        frame = await worker.next_generate()
        if started:
            worker.started(frame.id)
        fault(worker, frame.id)
        answer = await asking
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", code)
        assert "doom" not in error["message"]
        assert proxy.metric("prefixcache_requests_total", code=str(status)) == 1
        assert proxy.metric("prefixcache_num_requests_running") == 0


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
async def test_inside_a_stream_it_is_an_error_event_and_no_done(
    store: MemoryStore, fault: Callable[[FakeWorker, str], None], status: int, code: str
) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store, held_s=0.0) as proxy:
        await proxy.ready()
        streaming = asyncio.create_task(proxy.events())
        frame = await worker.next_generate()
        worker.step(frame.id, token_ids("hello"))
        await eventually(lambda: proxy.metric("prefixcache_time_to_first_token_seconds_count") == 1)
        fault(worker, frame.id)
        events = await streaming
        assert text_of(events) == "hello"
        assert events[-1]["error"]["code"] == code
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
        assert proxy.metric("prefixcache_requests_total", code=str(status)) == 1
        assert proxy.metric("prefixcache_prompt_tokens_total") == 0


async def test_the_openai_client_sees_both(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store) as worker,
        running_proxy(store) as proxy,
        openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        await proxy.ready()

        def ask() -> asyncio.Task[openai.AsyncStream[ChatCompletionChunk]]:
            asking = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
            )
            return asyncio.create_task(asking)

        asking = ask()
        frame = await worker.next_generate()
        worker.step(frame.id, token_ids("hello"))
        stream = await asking
        worker.fail(frame.id, "worker_fault")
        text = ""
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == "hello"
        assert caught.value.code == "worker_fault"

        asking = ask()
        frame = await worker.next_generate()
        worker.fail(frame.id, "worker_fault")
        with pytest.raises(openai.InternalServerError):
            await asking


@pytest.mark.parametrize(
    ("kind", "status"), [("refused", 400), ("overloaded", 429), ("draining", 503), ("worker_fault", 502)]
)
async def test_each_kind_of_fail_has_its_status(store: MemoryStore, kind: FailKind, status: int) -> None:
    async with (
        FakeWorker.open(store, script=lambda frame: Script(fail=kind)),
        running_proxy(store, held_s=0.0) as proxy,
    ):
        await proxy.ready()
        for stream in (False, True):
            answer = await proxy.chat(stream=stream)
            assert answer.status_code == status
            assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_a_fault_of_our_own_is_a_500_for_that_request_alone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        renderer = next(link.renderer for link in proxy.fleet.links)
        assert renderer is not None
        original = renderer.detokenizer

        class Broken:
            def feed(self, ids: object) -> str:
                raise RuntimeError("secret detail")

            def flush(self) -> str:
                return ""

        monkeypatch.setattr(renderer, "detokenizer", Broken)
        broken = asyncio.create_task(proxy.chat())
        broken_frame = await worker.next_generate()
        monkeypatch.setattr(renderer, "detokenizer", original)
        sound = asyncio.create_task(proxy.chat())
        sound_frame = await worker.next_generate()
        for frame in (broken_frame, sound_frame):
            worker.step(frame.id, token_ids("hello"))
        answer = await broken
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "internal error",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert "secret detail" in caplog.text, "the traceback is logged"
        await eventually(lambda: worker.aborts == [broken_frame.id])
        worker.end(sound_frame.id)
        assert (await sound).json()["choices"][0]["message"]["content"] == "hello"
