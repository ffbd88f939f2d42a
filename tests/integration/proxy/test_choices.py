"""Several choices of one chat, log probabilities and the other sampling fields."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from prefixcache.protocol import Generate, Sampling
from tests.support.fake_worker import FakeWorker, Script, says, token_ids
from tests.support.folding import folded_chat
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import body, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.waiting import eventually

PATH = "/v1/chat/completions"
TEXTS = ("zero", "one is né \N{BALLOON} longer", "two the end", "three")


def _says_by_choice(frame: Generate) -> Script:
    """Texts of different lengths, so that the choices end one after the other; the longest may not be longer."""
    ids = token_ids(TEXTS[frame.choice])
    reason: Any = "length" if len(ids) == frame.max_tokens else "stop"
    return Script(ids=ids, cached_tokens=16 * frame.choice, reason=reason)


def _without_id(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3, "stop": ["nger", "the"]}]
)
@pytest.mark.parametrize("n", [1, 2, 4])
async def test_folding_the_stream_gives_the_whole(store: MemoryStore, fields: dict[str, Any], n: int) -> None:
    async with FakeWorker.open(store, script=_says_by_choice) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        most = len(token_ids(TEXTS[1]))
        whole = (await proxy.chat(n=n, seed=3, max_tokens=most, **fields)).json()
        events = await proxy.events(n=n, seed=3, max_tokens=most, stream_options={"include_usage": True}, **fields)
        await eventually(lambda: worker.num_active == 0)
    assert events[-1] == "[DONE]"
    assert _without_id(folded_chat(events[:-1])) == _without_id(whole)
    assert [choice["index"] for choice in whole["choices"]] == list(range(n))
    assert [choice["finish_reason"] for choice in whole["choices"]][:3] == [
        "stop",
        "stop" if "stop" in fields else "length",
        "stop",
    ][:n]
    for choice, text in zip(whole["choices"], TEXTS, strict=False):
        expected = text.partition("nger")[0].partition("the")[0] if "stop" in fields else text
        assert choice["message"]["content"] == expected
        if "logprobs" in fields and "stop" not in fields:
            content = choice["logprobs"]["content"]
            assert bytes(byte for token in content for byte in token["bytes"]).decode() == text
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    frames = worker.generates[:n]
    assert [frame.choice for frame in frames] == list(range(n))
    assert len({(frame.prompt_ids, frame.root, frame.sampling.seed) for frame in frames}) == 1


async def test_what_the_worker_is_asked(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hi")) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        await proxy.chat(
            seed=5,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.05,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.05,
            logit_bias={"5": -1},
            min_tokens=2,
            logprobs=True,
            top_logprobs=4,
            stop_token_ids=[9, 2],
            max_tokens=3,
        )
        await proxy.chat(ignore_eos=True)
        await proxy.chat(ignore_eos=True, stop_token_ids=[9])
        await proxy.chat(min_tokens=10**6)
    asked, endless, stopped, clamped = worker.generates
    assert asked.sampling == Sampling(
        seed=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.05,
        logit_bias={5: -1},
        min_tokens=2,
        top_logprobs=4,
    )
    assert asked.stop_token_ids == (2, 9)
    assert endless.stop_token_ids == ()
    assert stopped.stop_token_ids == (9,)
    assert clamped.sampling.min_tokens == clamped.max_tokens


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["waiting", "decode", "one ended"])
async def test_a_client_that_leaves_aborts_all_its_choices(store: MemoryStore, phase: str, stream: bool) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, body(stream=stream, n=4)))
            frames = [await worker.next_generate() for _ in range(4)]
            if phase != "waiting":
                for frame in frames:
                    worker.step(frame.id, token_ids("hello"))
            if phase == "one ended":
                worker.end(frames[0].id)
            if phase != "waiting" and stream:
                await connection.head()
                await connection.chunk()
            elif phase != "waiting":
                expected = 3 if phase == "one ended" else 4
                await eventually(lambda: proxy.metric("prefixcache_num_requests_running") == expected)
        live = frames[1:] if phase == "one ended" else frames
        await eventually(lambda: sorted(worker.aborts) == sorted(frame.id for frame in live))
        await eventually(lambda: proxy.metric("prefixcache_requests_total", code="499") == 1)
        assert worker.num_active == 0
        assert proxy.metric("prefixcache_num_requests_waiting") == 0
        assert proxy.metric("prefixcache_num_requests_running") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_one_choice_that_fails_before_any_token_fails_the_request(store: MemoryStore, stream: bool) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        asking = asyncio.create_task(proxy.chat(n=3, stream=stream))
        frames = [await worker.next_generate() for _ in range(3)]
        worker.started(frames[0].id)
        worker.fail(frames[2].id, "overloaded")
        answer = await asking
        assert answer.status_code == 429, "there is no other worker"
        await eventually(lambda: sorted(worker.aborts) == sorted(frame.id for frame in frames[:2]))


async def test_one_choice_that_fails_later_is_an_error_event_and_ends_all(store: MemoryStore) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        streaming = asyncio.create_task(proxy.events(n=2))
        first, second = [await worker.next_generate() for _ in range(2)]
        worker.step(first.id, token_ids("hello"))
        worker.end(first.id)
        worker.step(second.id, token_ids("world"))
        await eventually(lambda: proxy.metric("prefixcache_time_to_first_token_seconds_count") == 1)
        worker.fail(second.id, "worker_fault")
        events = await streaming
        assert events[-1]["error"]["code"] == "worker_fault"
        reasons = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["stop"]
        assert proxy.metric("prefixcache_request_errors_total", code="worker_fault") == 1
        assert proxy.metric("prefixcache_prompt_tokens_total") == 0


async def test_metrics_of_several_choices(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=_says_by_choice), running_proxy(store) as proxy:
        await proxy.ready()
        usage = (await proxy.chat(n=3)).json()["usage"]
        num_tokens = sum(len(token_ids(text)) for text in TEXTS[:3])
        assert usage["completion_tokens"] == num_tokens
        assert proxy.metric("prefixcache_requests_total", code="200") == 1
        assert proxy.metric("prefixcache_prompt_tokens_total") == usage["prompt_tokens"]
        assert proxy.metric("prefixcache_generation_tokens_total") == num_tokens
        assert proxy.metric("prefixcache_inter_token_latency_seconds_count") == num_tokens - 3, "gaps within a choice"
        assert proxy.metric("prefixcache_time_to_first_token_seconds_count") == 1
        for phase, seconds in (("queue", 0.25), ("prefill", 0.5), ("decode", 2.0)):
            assert proxy.metric(f"prefixcache_request_{phase}_time_seconds_count") == 3
            assert proxy.metric(f"prefixcache_request_{phase}_time_seconds_sum") == 3 * seconds


async def test_the_openai_client(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, script=_says_by_choice),
        running_proxy(store) as proxy,
        openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        await proxy.ready()
        whole = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], n=3, logprobs=True, top_logprobs=2
        )
        assert tuple(choice.message.content for choice in whole.choices) == TEXTS[:3]
        logprobs = whole.choices[1].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert len(logprobs.content) == len(token_ids(TEXTS[1]))
        assert {len(token.top_logprobs) for token in logprobs.content} == {2}
        async with client.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "hello"}], n=2, logprobs=True, top_logprobs=2
        ) as accumulating:
            final = await accumulating.get_final_completion()
        assert tuple(choice.message.content for choice in final.choices) == TEXTS[:2]
        assert final.choices[1].logprobs == logprobs
