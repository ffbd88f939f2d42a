"""A worker whose index and registry are a real server that restarts, forgets and stands still."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.index.base import Match
from prefixcache.load import WorkerLoad
from prefixcache.store import RedisStore
from prefixcache.types import INDEX_STRIDE, KV_BLOCK_SIZE, pack_tokens
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner
from tests.support.stream_client import connected
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker
from worker.engine import Engine

PROMPT = list(range(650))
CHAIN = index_hashes(block_hashes(1, pack_tokens(PROMPT), KV_BLOCK_SIZE), INDEX_STRIDE)


@pytest.fixture
async def store(valkey: Server) -> AsyncIterator[RedisStore]:
    async with RedisStore.open(valkey.url) as opened:
        yield opened


@asynccontextmanager
async def worker(store: RedisStore, *, token_delay_s: float = 0.0) -> AsyncIterator[RunningWorker]:
    """A worker on the store; what it left in the index is checked when it has ended."""
    runner = ScriptedRunner(num_blocks=64, vocab_size=5_000, token_delay_s=token_delay_s)
    async with running_worker(runner, store=store) as running:
        namespace = running.record.namespace
        yield running
    await store.index(namespace).check_integrity()


async def serve(running: RunningWorker, prompt: list[int], request_id: str = "a") -> int:
    """One request on a connection of its own; its cached tokens."""
    async with connected(running.address, namespace=running.record.namespace) as client:
        client.send(generate(request_id, prompt))
        end = await client.ended(request_id)
        usage = getattr(end, "usage", None)
        assert usage is not None, end
        return int(usage.cached_tokens)


async def matches(store: RedisStore, running: RunningWorker, depth: int) -> None:
    """Until the index knows exactly `depth` index blocks of the prompt on the worker's incarnation."""
    index = store.index(running.record.namespace)

    async def known() -> bool:
        return (await index.match(CHAIN)).depths.get(running.record.incarnation, 0) == depth

    await eventually(known)


async def test_claims_follow_the_pool(store: RedisStore) -> None:
    async with worker(store) as running:
        assert [record.worker_id for record in await store.registry().live_workers()] == ["scripted-worker"]
        assert await serve(running, PROMPT) == 0
        await matches(store, running, 10)
        assert await serve(running, PROMPT) == 640
        await serve(running, [4_000 + token % 900 for token in range(600)])
        await matches(store, running, 6)
    assert await store.registry().live_workers() == []
    assert await store.index(running.record.namespace).match(CHAIN) == Match()


async def test_what_a_proxy_read_wrong_is_told_again_and_what_stood_there_stands_once(store: RedisStore) -> None:
    async with worker(store) as running, connected(running.address, namespace=running.record.namespace) as client:
        incarnation = running.record.incarnation
        await serve(running, PROMPT)
        await matches(store, running, 10)
        published = running.worker.metrics.published_hashes
        client.send(generate("few", PROMPT, predicted_hit_tokens=128, predicted_for=incarnation))
        await client.ended("few")
        await eventually(lambda: published.labels("stored")._value.get() == 10 + 8)
        other = [4_000 + token % 900 for token in range(400)]
        client.send(generate("many", other, predicted_hit_tokens=256, predicted_for=incarnation))
        await client.ended("many")
        await eventually(lambda: published.labels("stored")._value.get() == 10 + 8 + 6)
        await store.index(running.record.namespace).check_integrity()
        await matches(store, running, 9)
        repaired = running.worker.metrics.repaired_claims
        assert repaired.labels("stored")._value.get() == 8
        assert repaired.labels("removed")._value.get() == 4


async def test_the_load_follows_the_engine_and_ends_with_the_lease(store: RedisStore) -> None:
    async with worker(store, token_delay_s=0.001) as running:
        index, incarnation = store.index(running.record.namespace), running.record.incarnation

        async def load() -> WorkerLoad | None:
            known = await index.exchange_loads("a" * 16, {}, [incarnation])
            return known[incarnation].worker if incarnation in known else None

        async def is_told() -> bool:
            told, measured = await load(), running.engine.measure()
            return (
                told is not None
                and told.prefill_rate == pytest.approx(measured.prefill_rate)
                and told.inter_token_latency_s == pytest.approx(measured.inter_token_latency_s)
                and told.available_blocks == measured.available_blocks
                and told.rest_s == 0
                and measured.prefill_rate > 0
            )

        await serve(running, PROMPT)
        await eventually(is_told)
        before = await load()
        assert before is not None and not before.is_draining

        async def is_newer() -> bool:
            told = await load()
            return told is not None and told.version > before.version

        await eventually(is_newer)
        running.runner.pause()
        async with connected(running.address, namespace=running.record.namespace) as client:
            client.send(generate("b", [4_000 + token % 900 for token in range(1_000)]))

            async def has_rest() -> bool:
                told = await load()
                return told is not None and told.rest_s > 0 and told.available_blocks < before.available_blocks

            await eventually(has_rest)
            running.runner.resume()
    assert await load() is None


async def test_a_worker_that_ends_says_that_it_drains_before_it_leaves(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests that it holds fail only when the proxies have been told."""
    stopping, go_on = threading.Event(), threading.Event()
    stop = Engine.stop

    def held_stop(engine: Engine) -> None:
        stopping.set()
        go_on.wait(5)
        stop(engine)

    monkeypatch.setattr(Engine, "stop", held_stop)
    async with AsyncExitStack() as ending:
        running = await ending.enter_async_context(worker(store))
        index, incarnation = store.index(running.record.namespace), running.record.incarnation
        closing = asyncio.create_task(ending.pop_all().aclose())
        await eventually(stopping.is_set)
        (known,) = (await index.exchange_loads("a" * 16, {}, [incarnation])).values()
        assert known.worker is not None and known.worker.is_draining
        assert [record.worker_id for record in await store.registry().live_workers()] == ["scripted-worker"]
        go_on.set()
        await closing
    assert await index.exchange_loads("a" * 16, {}, [incarnation]) == {}
    assert await store.registry().live_workers() == []


async def test_an_emptied_server_is_told_everything_again(store: RedisStore, valkey: Server) -> None:
    async with worker(store) as running:
        await serve(running, PROMPT)
        await matches(store, running, 10)
        first = running.record.incarnation
        valkey.flush()
        await eventually(lambda: running.record.incarnation != first)
        await matches(store, running, 10)
        records = await store.registry().live_workers()
        assert [record.incarnation for record in records] == [running.record.incarnation]
        assert running.record.incarnation > first
        async with connected(running.address) as client:
            assert (await client.hello(running.record.namespace)).incarnation == running.record.incarnation


async def test_a_server_that_stands_still_costs_nothing_but_time(store: RedisStore, valkey: Server) -> None:
    async with worker(store) as running:
        first = running.record.incarnation
        with valkey.paused():
            assert await serve(running, PROMPT) == 0
            failures = running.worker.metrics.publish_failures
            await eventually(lambda: failures._value.get() >= 1)
        await matches(store, running, 10)
        assert running.record.incarnation == first


async def test_a_restarted_worker_is_another_incarnation_without_claims(store: RedisStore) -> None:
    async with worker(store) as running:
        await serve(running, PROMPT)
        await matches(store, running, 10)
        first = running.record.incarnation
    async with worker(store) as running:
        assert running.record.incarnation > first
        assert await store.index(running.record.namespace).match(CHAIN) == Match()
        records = await store.registry().live_workers()
        assert [record.incarnation for record in records] == [running.record.incarnation]
        await serve(running, PROMPT)
        await matches(store, running, 10)
