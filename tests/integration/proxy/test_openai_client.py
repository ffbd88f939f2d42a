"""The official Python client as users have it: sync, async, streams and its error classes."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.support.fake_worker import FakeWorker, says
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import running_proxy

TEXT = "Hello world, né \N{BALLOON}!"


async def test_async_client(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, script=says(TEXT, cached_tokens=8)),
        running_proxy(store) as proxy,
        openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        await proxy.ready()
        whole = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], n=1, logprobs=False, store=False
        )
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].message.role == "assistant"
        assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 8
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-1].usage == whole.usage
        assert [model.id async for model in client.models.list()] == ["tiny"]

        async with client.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "hello"}]
        ) as accumulating:
            final = await accumulating.get_final_completion()
        assert final.choices[0].message.content == TEXT
        assert final.choices[0].finish_reason == "stop"


async def test_sync_client(store: MemoryStore) -> None:
    def talk(url: str) -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
            whole = client.chat.completions.create(model="tiny", messages=messages)
            stream = client.chat.completions.create(model="tiny", messages=messages, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, streamed, [model.id for model in client.models.list()]

    async with FakeWorker.open(store, script=says(TEXT)), running_proxy(store) as proxy:
        await proxy.ready()
        assert await asyncio.to_thread(talk, proxy.url + "/v1") == (TEXT, TEXT, ["tiny"])


async def test_error_classes(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        async with openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as unavailable:
                await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
            assert unavailable.value.status_code == 503
            async with FakeWorker.open(store, script=says(TEXT), max_model_len=20):
                await proxy.ready()
                with pytest.raises(openai.NotFoundError) as missing:
                    await client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
                assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
                with pytest.raises(openai.BadRequestError) as too_long:
                    await client.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": "word " * 20}], stream=True
                    )
                assert too_long.value.code == "context_length_exceeded"
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": "x"}], frequency_penalty=3
                    )
                assert refused.value.param == "frequency_penalty"
