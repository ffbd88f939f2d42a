"""Two proxies that know of each other only through one index: pending claims, load, and what is left without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.limits import PENDING_SETTLED_S
from prefixcache.protocol import Generate
from tests.support.fake_worker import FakeWorker, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, body, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.waiting import eventually

PATH = "/v1/chat/completions"


def _messages(name: str) -> list[dict[str, str]]:
    """A prompt of some 900 tokens; those of one name are equal, others have nothing in common."""
    return [{"role": "system", "content": f"{name} word " * 300}]


def _chain(frame: Generate) -> list[int]:
    return index_hashes(block_hashes(frame.root, frame.prompt_ids, 16), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Two proxies and two workers."""

    store: MemoryStore
    proxies: tuple[RunningProxy, RunningProxy]
    workers: tuple[FakeWorker, FakeWorker]

    async def pending(self, frame: Generate) -> Mapping[int, int]:
        index = self.store.index(self.workers[0].record.namespace)
        return (await index.match(_chain(frame))).pending

    async def health(self, proxy: int = 0) -> Any:
        return (await self.proxies[proxy].client.get("/health")).json()

    async def ahead_s(self, proxy: int = 0) -> list[float]:
        """Of both workers, as this proxy sees them."""
        return [worker["ahead_s"] for worker in (await self.health(proxy))["workers"]]

    def num_received(self) -> list[int]:
        """Requests that each worker got: both proxies count theirs from 1, so a worker cannot tell them apart by id."""
        return [len(worker.generates) for worker in self.workers]

    async def is_zero(self) -> bool:
        """Whether nobody sees any load."""
        return not any([*await self.ahead_s(0), *await self.ahead_s(1)])


@asynccontextmanager
async def _world(store: MemoryStore, **worker: Any) -> AsyncIterator[World]:
    async with (
        FakeWorker.open(store, worker_id="w1", **worker) as w1,
        FakeWorker.open(store, worker_id="w2", **worker) as w2,
        running_proxy(store) as a,
        running_proxy(store) as b,
    ):
        await a.ready(2)
        await b.ready(2)
        yield World(store=store, proxies=(a, b), workers=(w1, w2))


@asynccontextmanager
async def _asking(proxy: RunningProxy, name: str) -> AsyncIterator[None]:
    """A client that has asked and leaves at the end of the block."""
    async with raw_connection(proxy.port) as connection:
        connection.send(post(PATH, body(messages=_messages(name))))
        yield


def _worker_with_requests(world: World, num_requests: int) -> FakeWorker | None:
    return next((worker for worker in world.workers if worker.num_active == num_requests), None)


async def test_equal_prompts_at_once_meet_on_one_worker(store: MemoryStore) -> None:
    async with _world(store) as world:
        async with _asking(world.proxies[0], "a"), _asking(world.proxies[1], "a"):
            await eventually(lambda: sorted(world.num_received()) == [0, 2])
        await eventually(world.is_zero)


async def test_a_commit_that_tells_of_a_deeper_prefix_moves_the_request(store: MemoryStore) -> None:
    """The second proxy matches before the first one has written, and commits after it."""
    async with _world(store) as world:
        index = store.index(world.workers[0].record.namespace)
        original = index.match
        matched, go_on = asyncio.Event(), asyncio.Event()

        async def slow(hashes: Any, **named: Any) -> Any:
            answer = await original(hashes, **named)
            matched.set()
            await go_on.wait()
            return answer

        index.match = slow  # type: ignore[method-assign]  # answers late what it knew in time
        async with _asking(world.proxies[1], "a"):
            await matched.wait()
            index.match = original  # type: ignore[method-assign]  # the others are answered at once
            async with _asking(world.proxies[0], "a"):
                await eventually(lambda: sorted(world.num_received()) == [0, 1])
                go_on.set()
                await eventually(lambda: sorted(world.num_received()) == [0, 2])
        second = world.proxies[1]
        assert second.metric("prefixcache_rescored_decisions_total") == 1
        assert second.metric("prefixcache_routing_decisions_total", reason="pending_prefix") == 1
        assert second.metric("prefixcache_index_commit_seconds_count") == 1
        await eventually(world.is_zero)


async def test_pending_claims_end_with_the_first_token(store: MemoryStore) -> None:
    async with _world(store) as world:
        proxy = world.proxies[0]
        async with _asking(proxy, "a"):
            await eventually(lambda: _worker_with_requests(world, 1) is not None)
            worker = _worker_with_requests(world, 1)
            assert worker is not None
            frame = await worker.next_generate()
            assert await world.pending(frame) == {worker.record.incarnation: len(_chain(frame))}
            worker.started(frame.id)
            await eventually(lambda: proxy.metric("prefixcache_num_requests_running") == 1)
            assert proxy.metric("prefixcache_pending_claims_total", change="settled") == 0
            worker.step(frame.id, token_ids("hi"))
            await eventually(lambda: proxy.metric("prefixcache_pending_claims_total", change="settled") == 1)
            assert await world.pending(frame) != {}, "until the claims of the worker are there"

            async def is_over() -> bool:
                return await world.pending(frame) == {}

            await eventually(is_over, timeout_s=2 * PENDING_SETTLED_S)
        assert proxy.metric("prefixcache_pending_claims_total", change="released") == 0


@pytest.mark.parametrize("how", ["client leaves", "worker fails", "worker dies"])
async def test_pending_claims_of_a_request_without_a_token_go_where_it_goes_and_are_released(
    store: MemoryStore, how: str
) -> None:
    async with _world(store) as world:
        proxy = world.proxies[0]
        async with _asking(proxy, "a"):
            await eventually(lambda: _worker_with_requests(world, 1) is not None)
            worker = _worker_with_requests(world, 1)
            assert worker is not None
            frame = await worker.next_generate()
            assert await world.pending(frame) != {}
            if how == "worker fails":
                worker.fail(frame.id, "worker_fault")
            elif how == "worker dies":
                worker.drop()
            if how != "client leaves":
                (other,) = [each for each in world.workers if each is not worker]
                await other.next_generate()
                assert set(await world.pending(frame)) == {other.record.incarnation}
        await eventually(lambda: proxy.metric("prefixcache_pending_claims_total", change="released") == 1)
        assert await world.pending(frame) == {}
        await eventually(world.is_zero)


async def test_the_load_of_a_proxy_is_seen_by_the_other_one_and_goes_with_its_requests(store: MemoryStore) -> None:
    async with _world(store) as world:
        async with _asking(world.proxies[0], "a"):
            await eventually(lambda: sum(world.num_received()) == 1)
            busy = 0 if world.workers[0].num_active else 1

            async def is_seen() -> bool:
                return (await world.ahead_s(1))[busy] > 0.5

            await eventually(is_seen)
            assert (await world.ahead_s(1))[1 - busy] == 0.0
            async with _asking(world.proxies[1], "b"):
                await eventually(lambda: world.workers[1 - busy].num_active == 1)
        await eventually(world.is_zero)


async def test_nothing_is_placed_where_nothing_is_computed(store: MemoryStore) -> None:
    async with _world(store) as world:
        answer = await world.proxies[0].client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "word " * 300, "max_tokens": 0, "echo": True}
        )
        assert answer.status_code == 200
        assert world.proxies[0].metric("prefixcache_pending_claims_total") == 0
        assert await world.is_zero()


async def test_without_the_index_a_proxy_goes_by_its_own_placements_and_comes_back_by_itself(
    store: MemoryStore,
) -> None:
    async with _world(store, script=says("hi")) as world:
        proxy = world.proxies[0]
        names = ("a", "b", "c", "d")
        first = {name: (await proxy.chat(messages=_messages(name))).headers["x-prefixcache-worker"] for name in names}
        assert (await world.health())["routing"] == "index"
        assert proxy.metric("prefixcache_index_available") == 1
        store.unavailable = True
        health = await world.health()
        assert health["routing"] == "own_placements"
        assert proxy.metric("prefixcache_index_available") == 0
        for name in names:
            answer = await proxy.chat(messages=_messages(name))
            assert answer.status_code == 200
            assert answer.headers["x-prefixcache-worker"] == first[name]
            assert answer.headers["x-prefixcache-reason"] == "own_placements"
            assert int(answer.headers["x-prefixcache-hit-tokens"]) > 500
        assert proxy.metric("prefixcache_own_placement_decisions_total", cause="no_answer") == 4
        assert proxy.metric("prefixcache_predicted_hit_tokens_total") == 0
        other = await world.proxies[1].chat(messages=_messages("a"))
        assert other.headers["x-prefixcache-reason"] == "no_prefix", "it never placed that one"
        store.unavailable = False
        assert (await world.health())["routing"] == "index"
        answer = await proxy.chat(messages=_messages("new"))
        assert answer.headers["x-prefixcache-reason"] == "no_prefix"
        answer = await world.proxies[1].chat(messages=_messages("new"))
        assert answer.headers["x-prefixcache-reason"] == "pending_prefix", "the proxies know of each other again"
        assert proxy.metric("prefixcache_own_placement_decisions_total") == 4
        await eventually(world.is_zero)


async def test_an_index_that_goes_while_a_request_runs_leaves_no_load_behind(store: MemoryStore) -> None:
    async with _world(store) as world:
        async with _asking(world.proxies[0], "a"):
            await eventually(lambda: sum(world.num_received()) == 1)
            store.unavailable = True
        await eventually(lambda: sum(worker.num_active for worker in world.workers) == 0)

        async def is_zero_here() -> bool:
            return not any(await world.ahead_s(0))

        await eventually(is_zero_here)
        store.unavailable = False
        await eventually(world.is_zero)


async def test_a_registry_without_any_live_lease_keeps_the_workers_whose_streams_stand(store: MemoryStore) -> None:
    async with _world(store, script=says("hi")) as world:
        store.flush()
        calls = store.faults.num_calls
        await eventually(lambda: store.faults.num_calls > calls + 20)
        for proxy in world.proxies:
            assert proxy.fleet.num_ready == 2
            assert (await proxy.chat(messages=_messages("a"))).status_code == 200
