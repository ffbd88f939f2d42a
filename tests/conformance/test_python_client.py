"""The official Python client: answers, streams, errors by class, headers, and what an abort frees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from tests.cases.world import MODEL, World
from tests.conformance.schema import model
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import running_proxy
from tests.support.waiting import eventually

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture
async def client(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=world.proxy.url + "/v1", api_key="unused", max_retries=0) as opened:
        yield opened


async def test_a_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert whole.usage is not None and whole.usage.completion_tokens > 0


async def test_the_accumulating_stream_helper(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, n=2, logprobs=True)
    async with client.chat.completions.stream(
        model=MODEL, messages=HELLO, temperature=0, n=2, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [choice.message.content for choice in whole.choices]
    assert [choice.logprobs for choice in final.choices] == [choice.logprobs for choice in whole.choices]
    assert final.usage is not None and whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


async def test_several_choices(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=5, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3, "each is drawn by itself"
    assert answer.usage is not None
    alone = await client.chat.completions.create(model=MODEL, messages=HELLO, seed=5, max_tokens=8)
    assert alone.choices[0].message.content == answer.choices[0].message.content
    assert alone.usage is not None and alone.usage.prompt_tokens == answer.usage.prompt_tokens, "a prompt counts once"


async def test_log_probabilities_of_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert choice.finish_reason == "stop" and answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens - 1, "all but the stop token"
    said = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert said.decode("utf-8", "replace") == choice.message.content, "the tokens are the text"
    for token in choice.logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )


async def test_completions(client: openai.AsyncOpenAI, world: World) -> None:
    ids = world.placeholders.ids(20)
    whole = await client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=12, logprobs=2)
    assert whole.choices[0].text == world.decoded(world.output(ids, 12)[: _num_tokens(whole)])
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == _num_tokens(whole)
    stream = await client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=12, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
    batch = await client.completions.create(model=MODEL, prompt=["hello", "world and you"], n=2, max_tokens=3)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    echoed = await client.completions.create(model=MODEL, prompt="hello", echo=True, max_tokens=3)
    assert echoed.choices[0].text.startswith("hello")


def _num_tokens(answer: openai.types.Completion) -> int:
    assert answer.usage is not None
    return answer.usage.completion_tokens


async def test_models(client: openai.AsyncOpenAI) -> None:
    raw = await client.models.with_raw_response.list()
    (only,) = raw.http_response.json()["data"]
    assert model(only).id == MODEL
    assert [found.id async for found in client.models.list()] == [MODEL]


async def test_headers_of_a_raw_response(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert raw.headers["x-prefixcache-worker"] == "w0"
    assert raw.headers["x-prefixcache-hit-tokens"] == "0"
    assert raw.headers["x-prefixcache-reason"]
    assert raw.request_id == raw.headers["x-request-id"]
    answer = raw.parse()
    assert answer._request_id == raw.request_id


async def test_extra_fields(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=60, extra_body={"ignore_eos": True, "top_k": 5, "min_tokens": 2}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 60


@pytest.mark.parametrize(
    "hint",
    [
        {"user": "u1"},
        {"safety_identifier": "s1"},
        {"prompt_cache_key": "chat-17"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"service_tier": "auto"},
        {"parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
    ],
)
async def test_hints_that_change_no_answer(client: openai.AsyncOpenAI, hint: dict[str, Any]) -> None:
    """What frameworks on top of the client send by habit."""
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0}
    plain = await client.chat.completions.create(**request)
    hinted = await client.chat.completions.create(**request, **hint)
    assert hinted.choices == plain.choices


ERRORS: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None, str | None]] = [
    (openai.NotFoundError, {"model": "no-such-model"}, "model_not_found", "model"),
    (openai.BadRequestError, {"max_tokens": -1}, None, "max_tokens"),
    (openai.BadRequestError, {"temperature": 3}, None, "temperature"),
    (openai.BadRequestError, {"n": 0}, None, "n"),
    (openai.BadRequestError, {"top_logprobs": 3}, None, "top_logprobs"),
    (openai.BadRequestError, {"max_tokens": 100_000}, "context_length_exceeded", "messages"),
    (openai.BadRequestError, {"messages": []}, None, "messages"),
    (openai.BadRequestError, {"extra_body": {"no_such_field": 1}}, None, "no_such_field"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "fields", "code", "param"), ERRORS)
async def test_errors_by_class(
    client: openai.AsyncOpenAI,
    kind: type[openai.APIStatusError],
    fields: dict[str, Any],
    code: str | None,
    param: str | None,
    stream: bool,
) -> None:
    with pytest.raises(kind) as raised:
        await client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields}, stream=stream)
    error = raised.value
    assert type(error) is kind
    assert error.status_code == error.response.status_code == (404 if kind is openai.NotFoundError else 400)
    assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
    assert error.request_id == error.response.headers["x-request-id"]
    assert isinstance(error.body, dict) and error.body["message"] in error.message


async def test_no_worker_is_a_server_error() -> None:
    async with running_proxy(MemoryStore()) as proxy:
        async with openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as raised:
                await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert (raised.value.status_code, raised.value.code) == (503, "unavailable")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_frees_the_worker(client: openai.AsyncOpenAI, world: World, stream: bool) -> None:
    (worker,) = world.workers
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 450, "extra_body": {"ignore_eos": True}}
    if stream:
        answer = await client.chat.completions.create(**request, stream=True)
        async for chunk in answer:
            if chunk.choices[0].delta.content:
                break
        await answer.close()
    else:
        asking = asyncio.create_task(client.chat.completions.create(**request))
        await eventually(lambda: world.num_running == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: world.num_running == 0)
    assert worker.runner.num_steps < 400
    assert world.proxy.metric("prefixcache_num_requests_running") == 0
    after = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert after.choices[0].finish_reason == "length"


async def test_a_client_timeout_frees_the_worker(client: openai.AsyncOpenAI, world: World) -> None:
    world.workers[0].runner.pause()
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model=MODEL, messages=HELLO, timeout=0.2)
    world.workers[0].runner.resume()
    await eventually(lambda: world.num_running == 0)


async def test_the_blocking_client(world: World) -> None:
    def talk() -> None:
        with openai.OpenAI(base_url=world.proxy.url + "/v1", api_key="unused", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
            with client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, stream=True) as stream:
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert streamed == whole.choices[0].message.content
            assert client.completions.create(model=MODEL, prompt="hello", max_tokens=2).choices[0].text
            assert [found.id for found in client.models.list()] == [MODEL]
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="no-such-model", messages=HELLO)
            with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=450, stream=True) as stream:
                next(iter(stream))

    await asyncio.to_thread(talk)
    await eventually(lambda: world.num_running == 0)
