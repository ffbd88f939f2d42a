"""Requests that come while no worker of their model is ready."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from prefixcache.limits import HELD_DOWN_S, LARGE_BODY_BYTES, RECORD_DEAD_AFTER_S
from prefixcache.types import pack_tokens
from proxy.app import BOOKS, FLEET, HELD
from tests.support.fake_worker import FakeWorker, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, body, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.waiting import eventually


@asynccontextmanager
async def _without_its_worker(
    store: MemoryStore, held_s: float = HELD_DOWN_S, drain_s: float = 3.0
) -> AsyncIterator[RunningProxy]:
    """A proxy whose only worker has gone."""
    async with running_proxy(store, held_s=held_s, drain_s=drain_s) as proxy:
        async with FakeWorker.open(store):
            await proxy.ready()
        await proxy.ready(0)
        yield proxy


def _held(proxy: RunningProxy) -> float:
    return proxy.metric("prefixcache_num_requests_held")


def _outcome(proxy: RunningProxy, outcome: str) -> float:
    return proxy.metric("prefixcache_held_requests_total", outcome=outcome)


@pytest.mark.parametrize("stream", [False, True])
async def test_they_wait_and_go_on_in_the_order_of_their_coming(store: MemoryStore, stream: bool) -> None:
    async with _without_its_worker(store) as proxy:
        asking: list[asyncio.Task[httpx.Response]] = []
        for name in "abc":
            messages = [{"role": "user", "content": name}]
            asking.append(asyncio.create_task(proxy.chat(stream=stream, messages=messages)))
            await eventually(lambda: _held(proxy) == len(asking))
        assert (await proxy.client.get("/ready")).status_code == 503, "nobody is told that all is well"
        assert (await proxy.client.get("/health")).status_code == 200
        async with FakeWorker.open(store) as worker:
            frames = [await worker.next_generate() for _ in asking]
            for frame in frames:
                worker.step(frame.id, token_ids("hi"))
                worker.end(frame.id)
            answers = await asyncio.gather(*asking)
        assert [answer.status_code for answer in answers] == [200] * 3
        for name, frame in zip("abc", frames, strict=True):
            assert pack_tokens(token_ids(name)) in frame.prompt_ids, "in their order"
        assert all(frame.waited_s > 0.0 for frame in frames)
        assert (_held(proxy), _outcome(proxy, "placed")) == (0, 3)


async def test_large_ones_wait_beside_each_other(store: MemoryStore) -> None:
    """One that waits for a worker does not keep others from being read."""
    content = json.dumps(body()).encode() + b" " * LARGE_BODY_BYTES
    async with _without_its_worker(store) as proxy:
        asking = [asyncio.create_task(proxy.client.post("/v1/chat/completions", content=content)) for _ in range(3)]
        await eventually(lambda: _held(proxy) == len(asking))
        async with FakeWorker.open(store, script=says("hi")):
            assert [(await answer).status_code for answer in asking] == [200] * 3


async def test_nobody_comes_in_time(store: MemoryStore) -> None:
    async with _without_its_worker(store, held_s=0.1) as proxy:
        answer = await proxy.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert (_held(proxy), _outcome(proxy, "expired")) == (0, 1)
        assert proxy.metric("prefixcache_requests_total", code="503") == 1


async def test_too_many_wait(store: MemoryStore) -> None:
    async with _without_its_worker(store) as proxy:
        proxy.app[HELD].most_held = 2
        asking = [asyncio.create_task(proxy.chat()) for _ in range(2)]
        await eventually(lambda: _held(proxy) == 2)
        answer = await proxy.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) >= 1
        async with FakeWorker.open(store, script=says("hi")):
            assert [(await each).status_code for each in asking] == [200, 200]
        assert (_outcome(proxy, "refused"), _outcome(proxy, "placed")) == (1, 2)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_client_that_leaves_is_seen(store: MemoryStore, how: str) -> None:
    async with _without_its_worker(store) as proxy:
        async with raw_connection(proxy.port) as connection:
            connection.send(post("/v1/chat/completions", body()))
            await eventually(lambda: _held(proxy) == 1)
            if how == "rst":
                connection.reset()
        await eventually(lambda: _held(proxy) == 0)
        await eventually(lambda: proxy.metric("prefixcache_requests_total", code="499") == 1)
        assert _outcome(proxy, "left") == 1
        async with FakeWorker.open(store, script=says("hi")) as worker:
            await proxy.ready()
            assert (await proxy.chat()).status_code == 200
            assert len(worker.generates) == 1


async def test_a_worker_that_ends_while_it_is_the_only_one_hands_on_to_the_next(store: MemoryStore) -> None:
    """As when the only worker is restarted: what it turns away waits for its successor."""
    async with FakeWorker.open(store, worker_id="old") as old, running_proxy(store) as proxy:
        await proxy.ready()
        asking = asyncio.create_task(proxy.chat())
        old.fail((await old.next_generate()).id, "draining")
        await eventually(lambda: _held(proxy) == 1)
        async with FakeWorker.open(store, worker_id="new", script=says("hi")):
            answer = await asking
        assert (answer.status_code, answer.headers["x-prefixcache-worker"]) == (200, "new")


async def test_only_a_model_that_is_known_is_waited_for(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        assert (await proxy.chat()).status_code == 503, "no worker has ever served it"
        async with FakeWorker.open(store, script=says("hi")):
            await proxy.ready()
            assert (await proxy.chat(model="other")).status_code == 404
        assert _outcome(proxy, "expired") == _held(proxy) == 0


async def test_a_model_whose_workers_left_long_ago_is_unknown_again(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy, FakeWorker.open(store, worker_id="w", served_names=("kept",)):
        async with FakeWorker.open(store, worker_id="leaves", served_names=("gone",)) as leaves:
            await proxy.ready(2)
            await store.registry().withdraw(leaves.record)
        await eventually(lambda: len(proxy.fleet.links) == 1)
        fleet = proxy.app[FLEET]
        ready = proxy.app[BOOKS].metrics.registry.get_sample_value
        assert fleet.knows("gone") and fleet.knows("kept")
        assert ready("prefixcache_workers_ready", {"model": "gone"}) == 0
        later = fleet._clock() + RECORD_DEAD_AFTER_S
        fleet._clock = lambda: later
        assert not fleet.knows("gone") and fleet.knows("kept")
        await eventually(lambda: ready("prefixcache_workers_ready", {"model": "gone"}) is None)
        assert ready("prefixcache_workers_ready", {"model": "kept"}) == 1
        assert (await proxy.chat(model="gone")).status_code == 404


async def test_a_proxy_that_ends_does_not_leave_them_without_an_answer(store: MemoryStore) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        async with _without_its_worker(store, drain_s=0.0) as proxy:
            asking = asyncio.create_task(client.post(proxy.url + "/v1/chat/completions", json=body()))
            await eventually(lambda: _held(proxy) == 1)
        answer = await asking
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
