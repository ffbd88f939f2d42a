"""Workers that say in a beat that they drain: nothing new is placed there, what they have is finished there."""

from __future__ import annotations

import asyncio

from tests.support.fake_worker import FakeWorker, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.pinned_policy import PinnedPolicy
from tests.support.proxy_harness import running_proxy, text_of
from tests.support.tiny_tokenizer import tiny_tokenizer_files
from tests.support.waiting import eventually
from tests.support.worker_harness import running_worker


async def test_it_is_not_even_asked(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, worker_id="first") as first,
        FakeWorker.open(store, worker_id="second", script=says("hi")) as second,
        running_proxy(store, policy=PinnedPolicy("first")) as proxy,
    ):
        await proxy.ready(2)
        streaming = asyncio.create_task(proxy.events())
        kept = await first.next_generate()
        first.step(kept.id, token_ids("hel"))
        first.beat(running=1, draining=True)
        await proxy.ready(1)
        answers = await asyncio.gather(*(proxy.chat() for _ in range(5)))
        assert {answer.headers["x-prefixcache-worker"] for answer in answers} == {"second"}
        assert (len(first.generates), len(second.generates)) == (1, 5)
        first.step(kept.id, token_ids("lo"))
        first.end(kept.id)
        assert text_of(await streaming) == "hello"
        assert first.aborts == []


async def test_where_it_is_the_only_one_requests_wait_for_the_next(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        async with FakeWorker.open(store, worker_id="old") as old:
            await proxy.ready()
            old.beat(draining=True)
            await proxy.ready(0)
            asking = asyncio.create_task(proxy.chat())
            await eventually(lambda: proxy.metric("prefixcache_num_requests_held") == 1)
            assert old.generates == []
        async with FakeWorker.open(store, worker_id="new", script=says("hi")):
            answer = await asking
        assert (answer.status_code, answer.headers["x-prefixcache-worker"]) == (200, "new")


async def test_only_who_goes_without_a_word_is_lost(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:

        def num_lost() -> float:
            return proxy.metric("prefixcache_workers_lost_total")

        async with FakeWorker.open(store, worker_id="leaves") as leaves:
            await proxy.ready()
            leaves.beat(draining=True)
            await proxy.ready(0)
        await eventually(lambda: all(link.stream is None for link in proxy.fleet.links))
        async with running_worker(store=store, tokenizer=tiny_tokenizer_files()):
            await proxy.ready()
        await eventually(lambda: all(link.stream is None for link in proxy.fleet.links))
        async with FakeWorker.open(store, worker_id="dies") as dies:
            await proxy.ready()
            assert num_lost() == 0, "nobody yet; a real one says so by itself"
            dies.drop()
            await eventually(lambda: num_lost() == 1)
            await proxy.ready()
        await eventually(lambda: num_lost() == 2)
