"""Engines that come, go, restart, hang and serve different models, behind a proxy that listens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal

import httpx
import pytest

from prefixcache.local_store import LocalStore
from proxy.engines.engine_link import EngineLink
from proxy.engines.engine_settings import EngineSettings
from tests.support import lru_engine
from tests.support.answer_bytes import chat_answer, json_answer, models_answer, whole
from tests.support.engine_answers import SGLANG_INFO, SGLANG_METRICS, VLLM_METRICS, VLLM_MODELS
from tests.support.engine_proxy import MODEL, EngineProxy, chat, engine_answers, engine_proxy
from tests.support.engine_text import EngineText
from tests.support.fake_worker import FakeWorker, says
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, running_proxy
from tests.support.scripted_engine import ReceivedRequest, Step, reset, scripted_engine, when
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.engines.engine_link.ENGINE_ASK_S", 0.02)
    monkeypatch.setattr("proxy.engines.engine_link.ENGINE_RETRY_FIRST_S", 0.01)
    monkeypatch.setattr("proxy.engines.engine_link.ENGINE_RETRY_MOST_S", 0.02)


class Engine:
    """Answers of one engine, by path; None closes the connection instead."""

    def __init__(self, *models: str, says: str = "hi") -> None:
        self.answers: dict[str, bytes | None] = {
            "/v1/models": models_answer(*(models or (MODEL,))),
            "/v1/chat/completions": chat_answer(says),
        }
        self.is_dead = False
        self.gate: asyncio.Event | None = None

    def __call__(self, request: ReceivedRequest) -> Sequence[Step]:
        answer = self.answers.get(request.target, whole(b"", status=404, reason="Not Found"))
        if self.is_dead or answer is None:
            return (reset(),)
        return (when(self.gate), answer) if self.gate is not None else (answer,)


async def health(proxy: RunningProxy) -> list[dict[str, Any]]:
    """What /health says of the engines."""
    engines: list[dict[str, Any]] = (await proxy.client.get("/health")).json()["engines"]
    return engines


def is_decided(link: EngineLink) -> bool:
    return link.is_up or link.failure is not None


def model_ids(answer: httpx.Response) -> list[str]:
    return [model["id"] for model in answer.json()["data"]]


async def test_models_of_all_engines_are_one_list_and_each_goes_to_its_own() -> None:
    one, two = Engine("a", "shared", says="of one"), Engine("b", "shared", says="of two")
    async with engine_proxy(one, two) as running:
        assert model_ids(await running.client.get("/v1/models")) == ["a", "b", "shared"]
        assert (await running.client.get("/v1/models/b")).json()["id"] == "b"
        for name, index in (("a", 0), ("b", 1), ("a", 0)):
            assert (await running.chat(model=name)).status_code == 200
            assert [len(running.asked(engine)) for engine in running.engines].count(0) < 2
            assert running.asked(running.engines[index])[-1].body.count(f'"{name}"'.encode()) == 1
        assert (len(running.asked(running.engines[0])), len(running.asked(running.engines[1]))) == (2, 1)


async def test_a_model_that_nobody_serves() -> None:
    async with engine_proxy(Engine("a")) as running:
        for answer in (await running.chat(model="c"), await running.client.get("/v1/models/c")):
            assert answer.status_code == 404
            assert answer.json()["error"] == {
                "message": "The model `c` does not exist",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        assert running.asked() == []


async def test_an_engine_goes_down_and_comes_back_with_its_models() -> None:
    one, two = Engine("a"), Engine("b")
    async with engine_proxy(one, two) as running:
        process = running.link(running.engines[0]).process
        one.is_dead = True
        await eventually(lambda: running.fleet.num_up == 1)
        assert model_ids(await running.client.get("/v1/models")) == ["b"]
        told, other = await health(running.proxy)
        assert not told["up"] and told["failure"] and told["models"] == ["a"]
        assert other["up"] and other["failure"] is None
        assert running.proxy.metric("prefixcache_engine_up", engine=told["id"]) == 0
        assert running.proxy.metric("prefixcache_engine_probe_failures_total", engine=told["id"]) >= 2
        answer = await running.client.get("/v1/models/a")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), "it may come back"
        assert (await running.client.get("/ready")).json() == {"workers_ready": 0, "engines_ready": 1}
        one.is_dead = False
        await eventually(lambda: running.fleet.num_up == 2)
        assert (await running.chat(model="a")).status_code == 200
        assert running.link(running.engines[0]).process != process, "what it had cached is taken for lost"


async def test_nobody_is_up() -> None:
    one = Engine()
    async with engine_proxy(one) as running:
        one.is_dead = True
        await eventually(lambda: running.fleet.num_up == 0)
        ready = await running.client.get("/ready")
        assert ready.status_code == 503 and ready.json()["engines_ready"] == 0
        assert "no engine is up" in ready.json()["error"]["message"]


async def test_a_refused_connection_is_seen_by_the_request_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.engines.engine_link.ENGINE_ASK_S", 3_600.0)
    async with AsyncExitStack() as stack:
        lost = AsyncExitStack()
        gone, stays = (
            await lost.enter_async_context(scripted_engine()),
            await stack.enter_async_context(scripted_engine()),
        )
        gone.answer = stays.answer = engine_answers()
        settings = EngineSettings(urls=[gone.url, stays.url])
        proxy = await stack.enter_async_context(running_proxy(LocalStore(), engines=settings))
        running = EngineProxy(proxy=proxy, engines=[gone, stays])
        await eventually(lambda: running.fleet.num_up == 2)
        await lost.aclose()
        answers = [await running.chat(f"question {number}") for number in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 8
        assert len(running.asked(stays)) == 8
        assert not running.link(gone).is_up


async def test_a_slow_engine_is_left_out_while_another_one_serves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.engines.engine_link.ENGINE_SUSPECT_S", 0.1)
    one, two = Engine(), Engine()
    async with engine_proxy(one, two) as running:
        slow = running.link(running.engines[0])
        one.gate = asyncio.Event()
        await eventually(lambda: slow.is_slow)
        for number in range(6):
            assert (await running.chat(f"question {number}")).status_code == 200
        assert len(running.asked(running.engines[1])) == 6
        assert slow.is_up and (await health(running.proxy))[0]["slow"]
        one.gate.set()
        one.gate = None
        await eventually(lambda: not slow.is_slow)


async def test_capacity_and_block_size_are_read_from_vllm() -> None:
    engine = Engine()
    engine.answers |= {"/v1/models": whole(VLLM_MODELS), "/metrics": whole(VLLM_METRICS)}
    async with engine_proxy(engine) as running:
        (told,) = await health(running.proxy)
        assert (told["block_size"], told["capacity_blocks"], told["prefix_caching"]) == (16, 5_600, True)
        assert (told["waiting"], told["running"]) == (1, 3), "requests that others sent it"
        base, adapter = (await running.client.get("/v1/models")).json()["data"]
        assert (base["id"], base["max_model_len"], base["owned_by"]) == ("Qwen/Qwen3-8B", 40_960, "vllm")
        assert (adapter["id"], adapter["parent"], adapter["root"]) == ("sql-adapter", "Qwen/Qwen3-8B", "/adapters/sql")


async def test_capacity_and_page_size_are_read_from_sglang() -> None:
    engine = Engine()
    engine.answers |= {"/metrics": whole(SGLANG_METRICS), "/get_server_info": whole(SGLANG_INFO)}
    async with engine_proxy(engine) as running:
        (told,) = await health(running.proxy)
        assert (told["block_size"], told["capacity_blocks"], told["prefix_caching"]) == (1, 442_368, True)


async def test_a_restart_between_two_probes_is_seen_by_its_counters() -> None:
    engine = Engine()
    engine.answers["/metrics"] = whole(VLLM_METRICS)
    async with engine_proxy(engine) as running:
        link = running.link(running.engines[0])
        process = link.process
        engine.answers["/metrics"] = whole(VLLM_METRICS.replace(b"1341177.0", b"1341999.0"))
        await eventually(lambda: link.metrics.queried_tokens == 1_341_999)
        assert link.process == process
        engine.answers["/metrics"] = whole(VLLM_METRICS.replace(b"1341177.0", b"12.0"))
        await eventually(lambda: link.process != process)


async def test_without_redis_health_says_so() -> None:
    async with running_proxy(
        LocalStore(), engines=EngineSettings(urls=["http://127.0.0.1:1"]), has_redis=False
    ) as proxy:
        told = (await proxy.client.get("/health")).json()
        assert told["redis"] is None and told["routing"] == "index" and told["workers"] == []
        answer = await proxy.client.get("/v1/models/m")
        assert answer.status_code == 503 and "not all engines" in answer.json()["error"]["message"]


async def test_own_workers_and_engines_behind_one_proxy(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, model="own", script=says("of a worker")),
        engine_proxy(Engine("theirs", says="of an engine"), store=store) as running,
    ):
        await running.proxy.ready()
        assert model_ids(await running.client.get("/v1/models")) == ["own", "theirs"]
        for name, text in (("own", "of a worker"), ("theirs", "of an engine")):
            answer = await running.client.post("/v1/chat/completions", json=chat(model=name))
            assert answer.json()["choices"][0]["message"]["content"] == text
        assert (await running.client.get("/ready")).json() == {"workers_ready": 1, "engines_ready": 1}
        assert (await running.chat(model="nobody's")).status_code == 404


async def test_the_key_of_the_engines_is_for_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_engine() as engine:
        refused = json_answer({"error": "unauthorized"}, status=401)
        serves = engine_answers()

        def locked(request: ReceivedRequest) -> Sequence[Step]:
            return serves(request) if request.header("authorization") == "Bearer k" else (refused,)

        engine.answer = locked
        for key, num_up in ((None, 0), ("k", 1)):
            settings = EngineSettings(urls=[engine.url], api_key=key)
            async with running_proxy(LocalStore(), engines=settings) as proxy:
                running = EngineProxy(proxy=proxy, engines=[engine])
                (link,) = running.fleet.links
                await eventually(partial(is_decided, link))
                assert running.fleet.num_up == num_up
                assert num_up or "PREFIXCACHE_ENGINE_API_KEY" in str(link.failure)
                answer = await running.chat()
                assert answer.status_code in (401, 503), (
                    "a request carries the key of its client, and this one has none"
                )


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
async def test_an_engine_that_listens_tells_of_itself_in_either_language(speaks: Literal["vllm", "sglang"]) -> None:
    about = lru_engine.EngineSettings(capacity_blocks=640, block_tokens=32, speaks=speaks, models=("lru", "adapter"))
    engine = lru_engine.LruEngine(about, EngineText())
    async with (
        lru_engine.serving_engine(engine) as url,
        running_proxy(LocalStore(), engines=EngineSettings(urls=[url])) as proxy,
    ):
        (link,) = EngineProxy(proxy=proxy, engines=[]).fleet.links
        await eventually(lambda: link.is_up)
        assert (link.block_size, link.capacity_blocks, link.caches_prefixes) == (32, 640, True)
        assert [model.name for model in link.models] == ["lru", "adapter"]
        process = link.process
        answer = await proxy.client.post("/v1/chat/completions", json=chat("some words", model="adapter"))
        assert answer.status_code == 200
        await eventually(lambda: (link.metrics.queried_tokens or 0) > 0)
        assert link.process == process


async def test_predictions_are_in_blocks_of_the_engines_own_size() -> None:
    engine = Engine()
    engine.answers["/metrics"] = whole(VLLM_METRICS.replace(b'block_size="16"', b'block_size="128"'))
    async with engine_proxy(engine) as proxy:
        (link,) = proxy.fleet.links
        await eventually(lambda: link.block_size == 128)
        text = "tell me more about it. " * 200
        await proxy.chat(text)
        await eventually(lambda: link.num_claims > 0)
        answer = await proxy.chat(text)
        hit_tokens = int(answer.headers["x-prefixcache-hit-tokens"])
        assert hit_tokens >= 512 and hit_tokens % 128 == 0
