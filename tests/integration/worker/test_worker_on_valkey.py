"""A worker whose index and registry are a real server that restarts, forgets and stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.store import RedisStore
from prefixcache.types import INDEX_STRIDE, KV_BLOCK_SIZE, pack_tokens
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner
from tests.support.stream_client import connected
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker

PROMPT = list(range(650))
CHAIN = index_hashes(block_hashes(1, pack_tokens(PROMPT), KV_BLOCK_SIZE), INDEX_STRIDE)


@pytest.fixture
async def store(valkey: Server) -> AsyncIterator[RedisStore]:
    async with RedisStore.open(valkey.url) as opened:
        yield opened


@asynccontextmanager
async def worker(store: RedisStore) -> AsyncIterator[RunningWorker]:
    """A worker on the store; what it left in the index is checked when it has ended."""
    runner = ScriptedRunner(num_blocks=64, vocab_size=5_000)
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
        return (await index.match(CHAIN)).get(running.record.incarnation, 0) == depth

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
    assert await store.index(running.record.namespace).match(CHAIN) == {}


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
        assert await store.index(running.record.namespace).match(CHAIN) == {}
        records = await store.registry().live_workers()
        assert [record.incarnation for record in records] == [running.record.incarnation]
        await serve(running, PROMPT)
        await matches(store, running, 10)
