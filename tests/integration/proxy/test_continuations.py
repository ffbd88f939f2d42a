"""What a client sees of a worker that is lost in the middle: nothing, as long as another one goes on in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.protocol import Generate
from prefixcache.types import unpack_tokens
from proxy import fault_breaker, pulse, worker_link
from tests.support.fake_worker import FakeWorker, token_ids
from tests.support.folding import folded_chat
from tests.support.memory_store import MemoryStore
from tests.support.pinned_policy import PinnedPolicy
from tests.support.proxy_harness import RunningProxy, body, running_proxy, text_of
from tests.support.raw_http import post, raw_connection
from tests.support.waiting import eventually

TEXT = "hello \N{BALLOON} world, né"
IDS = token_ids(TEXT)
MIDDLE = len(token_ids("hello \N{BALLOON}")) - 1
"""Within the character."""
USAGE = {"include_usage": True}


@asynccontextmanager
async def _world(store: MemoryStore) -> AsyncIterator[tuple[RunningProxy, list[FakeWorker]]]:
    """A proxy that sends everything to the first of two workers."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker.open(store, worker_id=name)) for name in ("w1", "w2")]
        async with running_proxy(store, policy=PinnedPolicy("w1")) as proxy:
            await proxy.ready(2)
            yield proxy, workers


def _begins(worker: FakeWorker, frame: Generate, until: int = MIDDLE) -> None:
    worker.started(frame.id, cached_tokens=3)
    for place in range(until):
        worker.step(frame.id, IDS[place : place + 1])


def _goes_on(worker: FakeWorker, frame: Generate) -> int:
    """From where it was; returns where that was."""
    begin = len(unpack_tokens(frame.output_ids))
    worker.started(frame.id, cached_tokens=0)
    worker.step(frame.id, IDS[begin:], index=begin)
    worker.end(frame.id, output_tokens=len(IDS) - begin)
    return begin


async def _tokens(proxy: RunningProxy, count: int) -> None:
    await eventually(lambda: proxy.metric("prefixcache_inter_token_latency_seconds_count") == count - 1)


def _drop(worker: FakeWorker, _: Generate) -> None:
    worker.drop()


def _garbage(worker: FakeWorker, _: Generate) -> None:
    worker.send_bytes(b"\xff\xff\xff\xff")


def _fault(worker: FakeWorker, frame: Generate) -> None:
    worker.fail(frame.id, "worker_fault", "tensor of doom at 0x7f")


def _drains(worker: FakeWorker, frame: Generate) -> None:
    worker.fail(frame.id, "draining")


def _skip(worker: FakeWorker, frame: Generate) -> None:
    worker.step(frame.id, token_ids("x"), index=999)


def _impossible_token(worker: FakeWorker, frame: Generate) -> None:
    worker.step(frame.id, [100_000])


def _cuts_short(worker: FakeWorker, frame: Generate) -> None:
    worker.end(frame.id, "length")


FAULTS = [_drop, _garbage, _fault, _drains, _skip, _impossible_token, _cuts_short]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("until", [0, MIDDLE])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_worker_goes_on(
    store: MemoryStore, fault: Callable[[FakeWorker, Generate], None], until: int, stream: bool
) -> None:
    async with _world(store) as (proxy, (first, second)):
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "n": 2, "seed": 5, "max_tokens": 50}
        whole = asyncio.create_task(proxy.chat(**fields))
        for frame in [await first.next_generate() for _ in range(2)]:
            _begins(first, frame, len(IDS))
            first.end(frame.id)
        undisturbed = (await whole).json()

        async def ask() -> Any:
            if not stream:
                return (await proxy.chat(**fields)).json()
            events = await proxy.events(stream_options=USAGE, **fields)
            assert events[-1] == "[DONE]"
            return folded_chat(events[:-1])

        asking = asyncio.create_task(ask())
        frames = [await first.next_generate() for _ in range(2)]
        for frame in frames:
            _begins(first, frame, until)
        await eventually(lambda: proxy.metric("prefixcache_num_requests_running", worker="w1") == 2)
        for frame in frames:
            fault(first, frame)
        for _ in frames:
            again = await second.next_generate()
            assert _goes_on(second, again) == until
            assert again.sampling == frame.sampling and again.max_tokens == frame.max_tokens
        answer = await asking
        assert answer["choices"] == undisturbed["choices"]
        assert answer["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"] == 2 * len(IDS)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (3 if until else 0), "of the worker that gave the first token"
        is_refusal = fault is _drains and not until
        assert proxy.metric("prefixcache_continuations_total", outcome="moved") == (0 if is_refusal else 2)
        assert proxy.metric("prefixcache_requests_total", code="200") == 2
        await eventually(lambda: _is_quiet(proxy))


async def _is_quiet(proxy: RunningProxy) -> bool:
    """Whether nothing of any request is left in the proxy."""
    health = (await proxy.client.get("/health")).json()
    loads = [each[key] for each in health["workers"] for key in ("waiting", "running", "ahead_s")]
    changes = {
        change: proxy.metric("prefixcache_pending_claims_total", change=change)
        for change in ("placed", "settled", "released")
    }
    gauges = [f"prefixcache_num_requests_{name}" for name in ("held", "running", "waiting")]
    return (
        not any(loads)
        and changes["placed"] == changes["settled"] + changes["released"]
        and not any(map(proxy.metric, gauges))
    )


async def test_the_head_names_the_worker_that_began(store: MemoryStore) -> None:
    async with _world(store) as (proxy, (first, second)):
        asking = asyncio.create_task(proxy.chat())
        frame = await first.next_generate()
        _begins(first, frame)
        await _tokens(proxy, MIDDLE)
        first.drop()
        _goes_on(second, await second.next_generate())
        assert (await asking).headers["x-prefixcache-worker"] == "w1"


async def test_completions_of_several_prompts_with_a_stop_string_over_the_seam(store: MemoryStore) -> None:
    async with _world(store) as (proxy, (first, second)):
        request = {"model": "tiny", "prompt": ["one", "two"], "stop": "\N{BALLOON} wor", "max_tokens": 50}
        asking = asyncio.create_task(proxy.client.post("/v1/completions", json=request))
        frames = [await first.next_generate() for _ in range(2)]
        for frame in frames:
            _begins(first, frame)
        await _tokens(proxy, 2 * MIDDLE - 1)
        first.drop()
        for _ in frames:
            again = await second.next_generate()
            second.step(again.id, IDS[MIDDLE:], index=MIDDLE)
        answer = (await asking).json()
        assert [choice["text"] for choice in answer["choices"]] == ["hello "] * 2
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 2
        assert len(second.aborts) == 2


async def test_the_only_worker_is_restarted(store: MemoryStore) -> None:
    """Its streams stand still until it is there again, under the same name and at another address."""
    async with AsyncExitStack() as stack, running_proxy(store) as proxy:
        async with FakeWorker.open(store) as first:
            await proxy.ready()
            streaming = asyncio.create_task(proxy.events(stream_options=USAGE))
            _begins(first, await first.next_generate())
            await _tokens(proxy, MIDDLE)
        await eventually(lambda: proxy.metric("prefixcache_num_requests_held") == 1)
        second = await stack.enter_async_context(FakeWorker.open(store))
        assert _goes_on(second, await second.next_generate()) == MIDDLE
        events = await streaming
        assert text_of(events) == TEXT and events[-1] == "[DONE]"
        assert proxy.metric("prefixcache_continuations_total", outcome="waited") == 1


@pytest.mark.parametrize("until", [0, MIDDLE])
@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_comes_in_time(store: MemoryStore, until: int, stream: bool) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store, held_s=0.1) as proxy:
        await proxy.ready()
        asking = asyncio.create_task(proxy.chat(stream=stream))
        frame = await worker.next_generate()
        _begins(worker, frame, until)
        await eventually(lambda: proxy.metric("prefixcache_num_requests_running") == 1)
        if until:
            await _tokens(proxy, until)
        worker.hello_namespace = "0" * 16  # it is not taken up again
        worker.drop()
        answer = await asking
        if stream and until:
            assert answer.status_code == 200
            assert '"code":"unavailable"' in answer.text and "[DONE]" not in answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        assert proxy.metric("prefixcache_requests_total", code="503") == 1
        await eventually(lambda: _is_quiet(proxy))


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_nobody_is_there(store: MemoryStore, stream: bool, how: str) -> None:
    async with running_proxy(store) as proxy:
        async with FakeWorker.open(store) as worker:
            await proxy.ready()
            async with raw_connection(proxy.port) as connection:
                connection.send(post("/v1/chat/completions", body(stream=stream)))
                _begins(worker, await worker.next_generate())
                await _tokens(proxy, MIDDLE)
                worker.hello_namespace = "0" * 16
                worker.drop()
                await eventually(lambda: proxy.metric("prefixcache_num_requests_held") == 1)
                if how == "rst":
                    connection.reset()
            await eventually(lambda: proxy.metric("prefixcache_requests_total", code="499") == 1)
            assert proxy.metric("prefixcache_continuations_total", outcome="left") == 1
            await eventually(lambda: _is_quiet(proxy))


@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_log_tells_only_what_a_worker_has_told(
    store: MemoryStore, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    caplog.set_level(logging.INFO, "proxy.access_log")
    async with _world(store) as (proxy, (first, second)):
        asking = asyncio.create_task(proxy.chat())
        frame = await first.next_generate()
        _begins(first, frame)
        if is_lost:
            first.drop()
            _goes_on(second, await second.next_generate())
        else:
            first.step(frame.id, IDS[MIDDLE:])
            first.end(frame.id)
        usage = (await asking).json()["usage"]
        (line,) = [record.getMessage() for record in caplog.records if "/v1/chat" in record.getMessage()]
        copied, computed = ("-", "-") if is_lost else ("0", str(usage["prompt_tokens"] - 3))
        assert f" cached=3 copied={copied} computed={computed} completion={len(IDS)} " in line
        assert f" preempted={'-' if is_lost else '0'} " in line


async def test_all_streams_of_a_dead_worker_go_on_spread_over_the_others(store: MemoryStore) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker.open(store, worker_id="w0"))]
        async with running_proxy(store) as proxy:
            await proxy.ready()
            asking = [asyncio.create_task(proxy.events(messages=_message(n))) for n in range(50)]
            for _ in asking:
                _begins(workers[0], await workers[0].next_generate())
            await _tokens(proxy, 50 * MIDDLE - 49)
            workers += [await stack.enter_async_context(FakeWorker.open(store, worker_id=f"w{n}")) for n in (1, 2, 3)]
            await proxy.ready(4)
            workers[0].drop()
            finishing = [asyncio.create_task(_finish_all(worker)) for worker in workers[1:]]
            answers = await asyncio.gather(*asking)
            for task in finishing:
                task.cancel()
            await asyncio.gather(*finishing, return_exceptions=True)
            assert [text_of(events) for events in answers] == [TEXT] * 50
            assert all(events[-1] == "[DONE]" for events in answers)
            assert all(len(worker.generates) > 10 for worker in workers[1:])
            await eventually(lambda: _is_quiet(proxy))


async def _finish_all(worker: FakeWorker) -> None:
    while True:
        _goes_on(worker, await worker.next_generate(60))


def _message(number: int) -> Sequence[dict[str, str]]:
    return [{"role": "user", "content": f"{number} word " * 20}]


@pytest.mark.parametrize("hang", ["silent", "beatless", "stuck", "forgetful"])
async def test_a_worker_that_hangs_is_cut_and_its_streams_go_on_elsewhere(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, hang: str
) -> None:
    monkeypatch.setattr(pulse, "WORKER_STUCK_LEAST_S" if hang == "stuck" else "WORKER_SILENCE_S", 0.5)
    monkeypatch.setattr(worker_link, "WORKER_KNOWS_S", 0.1)
    monkeypatch.setattr(fault_breaker, "WORKER_TRIAL_FIRST_S", 60.0)
    async with _world(store) as (proxy, (first, second)):
        streaming = asyncio.create_task(proxy.events())
        _begins(first, await first.next_generate())
        await _tokens(proxy, MIDDLE)
        if hang == "silent":
            first.is_mute = True
        elif hang == "beatless":
            first.sends_beats = False
        elif hang == "stuck":
            first.beat(running=1)
        else:
            first.forget()
        _goes_on(second, await second.next_generate())
        events = await streaming
        assert text_of(events) == TEXT and events[-1] == "[DONE]"
        if hang in ("stuck", "forgetful"):
            assert proxy.metric("prefixcache_worker_breaker_open", worker="w1") == 1
            await proxy.ready(2)
            asking = asyncio.create_task(proxy.chat())
            frame = await second.next_generate()
            second.step(frame.id, IDS)
            second.end(frame.id)
            assert (await asking).status_code == 200, "it answers again, but is not trusted yet"


async def test_the_official_client_sees_one_whole_stream(store: MemoryStore) -> None:
    async with (
        _world(store) as (proxy, (first, second)),
        openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        asking = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True)
        task = asyncio.create_task(asking)
        _begins(first, await first.next_generate())
        stream = await task
        first.drop()
        _goes_on(second, await second.next_generate())
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert len({chunk.id for chunk in chunks}) == 1


async def test_claims_of_a_lost_worker_stand_no_longer(store: MemoryStore) -> None:
    async with _world(store) as (proxy, (first, second)):
        messages = [{"role": "user", "content": "word " * 400}]
        asking = asyncio.create_task(proxy.chat(messages=messages))
        frame = await first.next_generate()
        chain = index_hashes(block_hashes(frame.root, frame.prompt_ids, 16), 4)
        index = store.index(first.record.namespace)
        assert set((await index.match(chain)).pending) == {first.record.incarnation}
        first.drop()
        again = await second.next_generate()
        await eventually(lambda: _only_pending(store, second, chain))
        _goes_on(second, again)
        assert (await asking).status_code == 200


async def _only_pending(store: MemoryStore, worker: FakeWorker, chain: Sequence[int]) -> bool:
    pending = (await store.index(worker.record.namespace).match(chain)).pending
    return set(pending) == {worker.record.incarnation}
