"""The engine that stands for vLLM in tests: its answers, its cache, what it tells, as clients and proxies see it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from tests.support.engine_text import EngineText
from tests.support.lru_engine import EngineSettings, LruEngine, serving_engine
from tests.support.waiting import eventually

SETTINGS = EngineSettings(capacity_blocks=64, overhead_s=0.0, prefill_s_per_token=0.0, itl_s=0.0)
CHAT = "/v1/chat/completions"
LONG = "word " * 40
"""On bytes, a block holds 16 of its characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    engine: LruEngine
    url: str
    session: aiohttp.ClientSession
    log: io.StringIO

    async def get(self, path: str) -> str:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200
            return await response.text()

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(self.url + path, json={"model": "lru", "max_tokens": 8, **body}) as response:
            answer: dict[str, Any] = await response.json()
            return response.status, answer

    async def chat(self, text: str, **body: Any) -> dict[str, Any]:
        status, answer = await self.post(CHAT, messages=[{"role": "user", "content": text}], **body)
        assert status == 200, answer
        return answer

    async def cached_tokens(self, text: str, **body: Any) -> int:
        usage = (await self.chat(text, **body))["usage"]
        cached_tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached_tokens


@asynccontextmanager
async def serving(settings: EngineSettings = SETTINGS) -> AsyncIterator[Client]:
    log = io.StringIO()
    engine = LruEngine(settings, EngineText(), log=log)
    async with serving_engine(engine) as url, aiohttp.ClientSession() as session:
        yield Client(engine=engine, url=url, session=session, log=log)


async def test_a_stream_says_what_the_whole_answer_says() -> None:
    async with serving() as client:
        whole = await client.chat(LONG)
        body = {"model": "lru", "max_tokens": 8, "messages": [{"role": "user", "content": LONG}]}
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.session.post(client.url + CHAT, json=wanted) as response:
            events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"] and len(text) == 8
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == 8


async def test_a_prompt_is_cached_to_its_last_full_block_and_its_answer_too() -> None:
    async with serving() as client:
        first = await client.chat(LONG)
        prompt_tokens = first["usage"]["prompt_tokens"]
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert await client.cached_tokens(LONG) == (prompt_tokens - 1) // 16 * 16
        said = [
            {"role": "user", "content": LONG},
            first["choices"][0]["message"],
            {"role": "user", "content": "and then?"},
        ]
        _, second = await client.post(CHAT, messages=said)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens + 8) // 16 * 16


async def test_what_does_not_fit_is_evicted_and_a_reset_empties() -> None:
    async with serving(replace(SETTINGS, capacity_blocks=20)) as client:
        await client.chat(LONG)
        await client.chat("other " * 40)
        left = [await client.cached_tokens(text) for text in (LONG, LONG)]
        assert left[0] < left[1], "the deepest blocks of the first were evicted, and came back"
        async with client.session.post(client.url + "/reset_prefix_cache") as response:
            assert response.status == 200
        assert await client.cached_tokens(LONG) == 0


async def test_salts_and_adapters_have_caches_of_their_own() -> None:
    async with serving(replace(SETTINGS, models=("lru", "adapter"))) as client:
        await client.chat(LONG)
        assert await client.cached_tokens(LONG, cache_salt="other") == 0
        assert await client.cached_tokens(LONG, model="adapter") == 0
        assert await client.cached_tokens(LONG) > 0
        cards = json.loads(await client.get("/v1/models"))["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("lru", None), ("adapter", "lru")]


async def test_completions_take_texts_and_ids() -> None:
    async with serving() as client:
        _, by_text = await client.post("/v1/completions", prompt=LONG)
        _, by_ids = await client.post("/v1/completions", prompt=list(LONG.encode()))
    assert by_text["choices"] == by_ids["choices"]
    assert by_ids["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(LONG) - 1) // 16 * 16


async def test_cached_tokens_may_be_kept_secret() -> None:
    async with serving(replace(SETTINGS, tells_cached_tokens=False)) as client:
        assert (await client.chat(LONG))["usage"]["prompt_tokens_details"] is None


async def test_metrics_tell_of_the_cache_in_the_words_of_vllm() -> None:
    async with serving() as client:
        await client.chat(LONG)
        cached_tokens = await client.cached_tokens(LONG)
        lines = (await client.get("/metrics")).splitlines()
    [config] = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in config and 'num_gpu_blocks="64"' in config
    assert f'vllm:prefix_cache_hits_total{{engine="0",model_name="lru"}} {float(cached_tokens)}' in lines


async def test_metrics_and_sizes_in_the_words_of_sglang() -> None:
    async with serving(replace(SETTINGS, speaks="sglang")) as client:
        await client.chat(LONG)
        info = json.loads(await client.get("/server_info"))
        metrics = await client.get("/metrics")
    assert info["max_total_num_tokens"] == 64 * 16 and info["page_size"] == 16
    assert "sglang:cached_tokens_total" in metrics and "vllm:" not in metrics


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "other", "prompt": "a"}, 404, "does not exist"),
        ({"prompt": "a" * 9000}, 400, "context length"),
        ({"text": "a"}, 400, "messages or a prompt"),
    ],
)
async def test_refusals_are_worded_as_by_engines(body: dict[str, Any], status: int, words: str) -> None:
    async with serving() as client:
        found, answer = await client.post("/v1/completions", **body)
    assert found == status
    assert words in answer["error"]["message"]


async def test_prefill_takes_its_time_and_waits_for_its_turn_unless_told_otherwise() -> None:
    slow = replace(SETTINGS, prefill_s_per_token=0.4e-3)
    for settings, is_serial in ((slow, True), (replace(slow, has_concurrent_prefill=True), False)):
        async with serving(settings) as client:
            loop = asyncio.get_running_loop()
            began = loop.time()
            await asyncio.gather(*(client.chat(f"{number}{LONG}") for number in range(4)))
            took_s = loop.time() - began
        one_s = (len(LONG) + 1) * slow.prefill_s_per_token
        assert took_s > (4 if is_serial else 1) * one_s
        assert is_serial or took_s < 3 * one_s, "prefills overlap"


async def test_a_client_that_leaves_frees_its_place() -> None:
    async with serving(replace(SETTINGS, itl_s=1.0)) as client:
        body = {"model": "lru", "max_tokens": 64, "prompt": "a", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            assert client.engine.num_running == 1
            response.close()
        await eventually(lambda: client.engine.num_running == 0)


async def test_every_prefill_is_in_the_log() -> None:
    async with serving() as client:
        first = await client.chat(LONG)
        cached_tokens = await client.cached_tokens(LONG)
        lines = [json.loads(line) for line in client.log.getvalue().splitlines()]
    num_tokens = first["usage"]["prompt_tokens"]
    assert [(line["n"], line["cached"]) for line in lines] == [(num_tokens, 0), (num_tokens, cached_tokens)]
    assert all(len(line["blocks"]) == (num_tokens + 8) // 16 for line in lines)
