"""A request that waits for one worker is moved to another one that has nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.protocol import Generate
from tests.support.fake_worker import FakeWorker, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.pinned_policy import PinnedPolicy
from tests.support.proxy_harness import RunningProxy, body, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.waiting import eventually


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A proxy that sends everything to `busy`, and `idle`."""

    proxy: RunningProxy
    busy: FakeWorker
    idle: FakeWorker
    policy: PinnedPolicy
    asking: set[asyncio.Task[httpx.Response]]

    def ask(self, name: str, **fields: object) -> asyncio.Task[httpx.Response]:
        task = asyncio.create_task(self.proxy.chat(messages=_messages(name), **fields))
        self.asking.add(task)
        return task

    def steals(self, outcome: str) -> float:
        return self.proxy.metric("prefixcache_steals_total", outcome=outcome)

    async def is_quiet(self) -> bool:
        """Whether nothing of any request is left in the proxy."""
        health = (await self.proxy.client.get("/health")).json()
        loads = [each[key] for each in health["workers"] for key in ("waiting", "running", "ahead_s")]
        placed = self.proxy.metric("prefixcache_pending_claims_total", change="placed")
        ended = sum(
            self.proxy.metric("prefixcache_pending_claims_total", change=change) for change in ("settled", "released")
        )
        return not any(loads) and placed == ended


def _messages(name: str) -> list[dict[str, str]]:
    """A prompt of some 900 tokens: about a second of prefill at the rate that is assumed."""
    return [{"role": "system", "content": f"{name} word " * 300}]


@asynccontextmanager
async def _world(store: MemoryStore) -> AsyncIterator[World]:
    policy = PinnedPolicy("busy")
    asking: set[asyncio.Task[httpx.Response]] = set()
    async with (
        FakeWorker.open(store, worker_id="busy") as busy,
        FakeWorker.open(store, worker_id="idle") as idle,
        running_proxy(store, policy=policy) as proxy,
    ):
        await proxy.ready(2)
        yield World(proxy=proxy, busy=busy, idle=idle, policy=policy, asking=asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _two_asked(world: World, **fields: object) -> tuple[list[asyncio.Task[httpx.Response]], list[Generate]]:
    """The first has begun, the second waits for it."""
    asking = [world.ask("a", **fields)]
    frames = [await world.busy.next_generate()]
    world.busy.started(frames[0].id)
    asking.append(world.ask("b", **fields))
    frames.append(await world.busy.next_generate())
    await eventually(lambda: world.proxy.metric("prefixcache_num_requests_running", worker="busy") == 1)
    return asking, frames


def _finish(worker: FakeWorker, frame: Generate, text: str = "hello") -> None:
    worker.step(frame.id, token_ids(text))
    worker.end(frame.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_waits_goes_to_whoever_has_nothing_to_do(store: MemoryStore, stream: bool) -> None:
    async with _world(store) as world:
        (first, second), (running, waiting) = await _two_asked(world, stream=stream)
        world.idle.beat()
        moved = await world.idle.next_generate()
        assert world.busy.asked_back == [waiting.id]
        assert (moved.prompt_ids, moved.root, moved.sampling) == (waiting.prompt_ids, waiting.root, waiting.sampling)
        assert moved.waited_s > waiting.waited_s > 0.0
        assert (waiting.predicted_hit_tokens, waiting.predicted_for) == (0, world.busy.record.incarnation)
        assert moved.predicted_hit_tokens is None, "nobody had asked the index for this worker's sake"
        _finish(world.idle, moved)
        answer = await second
        assert answer.status_code == 200
        assert answer.headers["x-prefixcache-worker"] == "idle"
        assert answer.headers["x-prefixcache-reason"] == "stolen"
        _finish(world.busy, running)
        assert (await first).headers["x-prefixcache-worker"] == "busy"
        assert world.steals("moved") == 1
        await eventually(world.is_quiet)


async def test_pending_claims_and_load_move_along(store: MemoryStore) -> None:
    async with _world(store) as world:
        _, (_, waiting) = await _two_asked(world)
        index = store.index(world.busy.record.namespace)
        chain = index_hashes(block_hashes(waiting.root, waiting.prompt_ids, 16), 4)

        async def pending() -> set[int]:
            return set((await index.match(chain)).pending)

        assert await pending() == {world.busy.record.incarnation}
        world.idle.beat()
        await world.idle.next_generate()
        assert await pending() == {world.idle.record.incarnation}
        health = (await world.proxy.client.get("/health")).json()
        assert {each["id"]: (each["waiting"], each["running"]) for each in health["workers"]} == {
            "busy": (0, 1),
            "idle": (1, 0),
        }


async def test_one_that_has_started_meanwhile_stays(store: MemoryStore) -> None:
    async with _world(store) as world:
        (_, second), (_, waiting) = await _two_asked(world)
        world.busy.answers_aborts = False
        world.idle.beat()
        await eventually(lambda: world.busy.asked_back == [waiting.id])
        world.busy.started(waiting.id)
        await eventually(lambda: world.steals("stayed") == 1)
        _finish(world.busy, waiting)
        answer = await second
        assert (answer.status_code, answer.headers["x-prefixcache-worker"]) == (200, "busy")
        assert world.idle.generates == []


async def test_one_request_at_a_time(store: MemoryStore) -> None:
    async with _world(store) as world:
        _, (_, second) = await _two_asked(world)
        asking = world.ask("c")
        third = await world.busy.next_generate()
        world.busy.answers_aborts = False
        world.idle.beat()
        await eventually(lambda: world.busy.asked_back == [third.id])
        for _ in range(3):
            world.idle.beat()
        world.busy.answers_aborts = True
        world.busy.end(third.id, "aborted")
        moved = await world.idle.next_generate()
        world.idle.beat()  # it crosses the frame: what was sent there is not started yet
        world.idle.started(moved.id)
        _finish(world.idle, moved)
        assert (await asking).headers["x-prefixcache-worker"] == "idle"
        assert world.busy.asked_back == [third.id], "the last one gained most"
        world.idle.beat()
        assert (await world.idle.next_generate()).prompt_ids == second.prompt_ids
        assert world.steals("moved") == 2


@pytest.mark.parametrize("beat", [{"waiting": 1}, {"prefilling": 1, "running": 1}])
async def test_a_worker_that_owes_a_first_token_gets_nothing(store: MemoryStore, beat: dict[str, Any]) -> None:
    async with _world(store) as world:
        await _two_asked(world)
        idle = next(link for link in world.proxy.fleet.links if link.worker_id == "idle")
        world.idle.beat(**beat)
        await eventually(lambda: idle.num_waiting + idle.num_running)
        assert world.busy.asked_back == []
        world.idle.beat(running=3)
        await eventually(lambda: len(world.busy.asked_back) == 1)


async def test_neither_an_old_worker_nor_requests_of_several_choices_are_asked(store: MemoryStore) -> None:
    async with _world(store) as world:
        await _two_asked(world, n=2)
        frames = [await world.busy.next_generate() for _ in range(2)]
        assert {frame.choice for frame in frames} == {0, 1}
        world.idle.beat(running=7)
        idle = next(link for link in world.proxy.fleet.links if link.worker_id == "idle")
        await eventually(lambda: idle.num_running == 7)
        assert world.busy.asked_back == []


async def test_a_worker_of_an_earlier_version_is_not_asked(store: MemoryStore) -> None:
    async with _world(store) as world:
        world.busy.minor = 1
        world.busy.drop()
        await eventually(lambda: world.busy.num_connections == 2)
        await world.proxy.ready(2)
        await _two_asked(world)
        world.idle.beat(running=7)
        idle = next(link for link in world.proxy.fleet.links if link.worker_id == "idle")
        await eventually(lambda: idle.num_running == 7)
        assert world.busy.asked_back == []


@pytest.mark.parametrize("answer", ["aborted", "started"])
async def test_a_client_that_leaves_in_the_middle(store: MemoryStore, answer: str) -> None:
    async with _world(store) as world:
        _, (_, second) = await _two_asked(world)
        async with raw_connection(world.proxy.port) as connection:
            connection.send(post("/v1/chat/completions", body(messages=_messages("c"))))
            third = await world.busy.next_generate()
            world.busy.answers_aborts = False
            world.idle.beat()
            await eventually(lambda: world.busy.asked_back == [third.id])
        await eventually(lambda: world.steals("left") == 1)
        await eventually(lambda: world.busy.aborts == [third.id])
        if answer == "started":
            world.busy.started(third.id)
        world.busy.end(third.id, "aborted")
        world.busy.answers_aborts = True
        world.idle.beat()
        moved = await world.idle.next_generate()
        assert moved.prompt_ids == second.prompt_ids, "the next one is not kept from it"
        assert world.steals("moved") == 1 and len(world.idle.generates) == 1


async def test_its_worker_dies_in_the_middle(store: MemoryStore) -> None:
    """What it was asked for goes where it was to go, and the other one goes on there."""
    async with _world(store) as world:
        (first, second), (_, waiting) = await _two_asked(world)
        world.busy.answers_aborts = False
        world.idle.beat()
        await eventually(lambda: world.busy.asked_back == [waiting.id])
        world.busy.drop()
        for _ in range(2):
            _finish(world.idle, await world.idle.next_generate())
        for answer in (await first, await second):
            assert (answer.status_code, answer.headers["x-prefixcache-worker"]) == (200, "idle")
        assert world.steals("moved") == 1
        await eventually(world.is_quiet)


async def test_the_idle_worker_dies_in_the_middle(store: MemoryStore) -> None:
    async with _world(store) as world:
        (_, second), (_, waiting) = await _two_asked(world)
        world.busy.answers_aborts = False
        world.idle.beat()
        await eventually(lambda: world.busy.asked_back == [waiting.id])
        world.idle.minor = -1  # its stream is not taken up again
        world.idle.hello_namespace = "0" * 16
        world.idle.drop()
        await world.proxy.ready(1)
        world.busy.end(waiting.id, "aborted")
        again = await world.busy.next_generate()
        assert again.prompt_ids == waiting.prompt_ids and again.predicted_hit_tokens is None
        _finish(world.busy, again)
        answer = await second
        assert (answer.status_code, answer.headers["x-prefixcache-worker"]) == (200, "busy")


async def test_both_workers_die_in_the_middle(store: MemoryStore) -> None:
    """Both requests are held until one of them is there again."""
    async with _world(store) as world:
        asking, (_, waiting) = await _two_asked(world)
        world.busy.answers_aborts = False
        world.idle.beat()
        await eventually(lambda: world.busy.asked_back == [waiting.id])
        world.idle.drop()
        await world.proxy.ready(1)
        world.busy.drop()
        finishing = [asyncio.create_task(_finish_all(worker)) for worker in (world.busy, world.idle)]
        assert [(await each).status_code for each in asking] == [200, 200]
        for task in finishing:
            task.cancel()
        await asyncio.gather(*finishing, return_exceptions=True)
        assert world.steals("failed") == 1 or world.steals("moved") == 1


async def _finish_all(worker: FakeWorker) -> None:
    while True:
        _finish(worker, await worker.next_generate(60))


async def test_what_the_idle_worker_has_of_a_prompt_decides_who_is_moved(store: MemoryStore) -> None:
    """The match of its placement tells. The last one in the queue would gain most if all were alike."""
    async with _world(store) as world:
        world.policy.worker_id = "idle"
        asking = world.ask("known")
        frame = await world.idle.next_generate()
        _finish(world.idle, frame)
        await asking
        chain = index_hashes(block_hashes(frame.root, frame.prompt_ids, 16), 4)
        index = store.index(world.idle.record.namespace)
        await index.apply(world.idle.record.incarnation, 1, stored=chain, removed=[])
        world.policy.worker_id = "busy"
        await _two_asked(world)
        world.ask("known")
        known = await world.busy.next_generate()
        world.ask("c")
        await world.busy.next_generate()
        world.idle.beat()
        assert (await world.idle.next_generate()).prompt_ids == known.prompt_ids
        assert world.busy.asked_back == [known.id]
