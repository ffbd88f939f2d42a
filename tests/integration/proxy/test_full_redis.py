"""A Redis that has used up its maxmemory takes no more claims, and everybody is served; who cannot serve says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.store import RedisStore
from tests.support.fake_worker import FakeWorker, says
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, running_proxy
from tests.support.scripted_runner import ScriptedRunner
from tests.support.tiny_tokenizer import TINY_SPECIAL_TOKENS, tiny_tokenizer_files
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker

MESSAGES = [{"role": "user", "content": "the answer is in the question and " * 40}]


@pytest.fixture
def full_server(any_server: Server) -> Iterator[Server]:
    any_server.command("CONFIG", "SET", "maxmemory", 1)
    yield any_server
    any_server.command("CONFIG", "SET", "maxmemory", 0)


def worker_on(store: RedisStore) -> Any:
    """Each one is another life of the same worker."""
    runner = ScriptedRunner(max_model_len=2048, reserved=len(TINY_SPECIAL_TOKENS))
    return running_worker(runner, store=store, worker_id="w", model="tiny", tokenizer=tiny_tokenizer_files())


async def redis_of(proxy: RunningProxy) -> Any:
    return (await proxy.client.get("/health")).json()["redis"]


async def reason_of_a_chat(proxy: RunningProxy) -> str:
    answer = await proxy.chat(messages=MESSAGES, max_tokens=4)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-prefixcache-reason"]


async def test_a_stack_that_begins_on_a_full_server_serves(
    full_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisStore.open(full_server.url) as store, running_proxy(store) as proxy:
        async with worker_on(store):
            await proxy.ready()
            assert (await proxy.client.get("/ready")).status_code == 200
            told = await redis_of(proxy)
            assert (told["memory_full"], told["secret_known"]) == (True, True)
            await reason_of_a_chat(proxy)
        await eventually(lambda: proxy.fleet.num_ready == 0)
        worker: RunningWorker
        async with worker_on(store) as worker:
            await proxy.ready()
            assert await reason_of_a_chat(proxy) != "longest_prefix"
            await eventually(lambda: worker.worker.metrics.publish_failures._value.get() > 0)
            full_server.command("CONFIG", "SET", "maxmemory", 0)

            async def is_found() -> bool:
                return await reason_of_a_chat(proxy) == "longest_prefix"

            await eventually(is_found)
    for program in ("proxy", "worker.publisher"):
        assert [each for each in caplog.records if each.name == program and "maxmemory" in each.message], program


class WithoutSecret(MemoryStore):
    """Neither tells nor takes one until it is told to."""

    tells = False

    async def deployment_secret(self, configured: bytes | None) -> bytes:
        if not self.tells:
            raise IndexUnavailable("no")
        return await super().deployment_secret(configured)


async def test_a_proxy_without_a_secret_is_not_ready() -> None:
    store = WithoutSecret()
    async with FakeWorker.open(store, script=says("hi")), running_proxy(store) as proxy:
        await proxy.ready()
        ready = await proxy.client.get("/ready")
        assert (ready.status_code, ready.json()["workers_ready"]) == (503, 1)
        assert "secret" in ready.json()["error"]["message"] and int(ready.headers["retry-after"]) >= 1
        assert (await redis_of(proxy))["secret_known"] is False
        assert (await proxy.chat()).status_code == 503
        store.tells = True

        async def is_ready() -> bool:
            return (await proxy.client.get("/ready")).status_code == 200

        await eventually(is_ready)
        assert (await redis_of(proxy))["secret_known"] is True
        assert (await proxy.chat()).status_code == 200
