"""A worker that takes no more, ends soon, or fails a request: another one answers it, or goes on with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from prefixcache.limits import WORKER_FAULTS, WORKER_TRIAL_FIRST_S
from prefixcache.protocol import FailKind
from prefixcache.types import unpack_tokens
from proxy.fault_breaker import FaultBreaker
from tests.support.fake_worker import FakeWorker, Script, says, token_ids
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.pinned_policy import PinnedPolicy
from tests.support.proxy_harness import RunningProxy, running_proxy, text_of
from tests.support.waiting import eventually


@asynccontextmanager
async def _world(store: MemoryStore) -> AsyncIterator[tuple[RunningProxy, FakeWorker, FakeWorker]]:
    """A proxy that sends everything to the first worker."""
    async with (
        FakeWorker.open(store, worker_id="first") as first,
        FakeWorker.open(store, worker_id="second") as second,
        running_proxy(store, policy=PinnedPolicy("first"), held_s=0.0) as proxy,
    ):
        await proxy.ready(2)
        yield proxy, first, second


@pytest.mark.parametrize("kind", ["overloaded", "draining"])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_one_answers(store: MemoryStore, kind: FailKind, started: bool, stream: bool) -> None:
    async with _world(store) as (proxy, first, second):
        asking = asyncio.create_task(proxy.chat(stream=stream))
        refused = await first.next_generate()
        if started:
            first.started(refused.id)
        first.fail(refused.id, kind)
        frame = await second.next_generate()
        assert (frame.prompt_ids, frame.sampling) == (refused.prompt_ids, refused.sampling)
        assert frame.waited_s > refused.waited_s
        assert refused.predicted_hit_tokens == 0 and frame.predicted_hit_tokens is None
        second.step(frame.id, token_ids("hello"))
        second.end(frame.id)
        answer = await asking
        assert (answer.status_code, answer.headers["x-prefixcache-worker"]) == (200, "second")
        assert first.aborts == second.aborts == []
        assert proxy.metric("prefixcache_num_requests_waiting") == 0
        assert proxy.metric("prefixcache_num_requests_running") == 0


async def test_where_all_are_overloaded_it_is_told_when_the_first_has_room(store: MemoryStore) -> None:
    async with _world(store) as (proxy, first, second):
        asking = asyncio.create_task(proxy.chat())
        first.fail((await first.next_generate()).id, "overloaded", retry_after_s=9.0)
        second.fail((await second.next_generate()).id, "overloaded", retry_after_s=4.0)
        answer = await asking
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        asking = asyncio.create_task(proxy.chat())
        frame = await first.next_generate()
        first.end(frame.id)
        assert (await asking).status_code == 200, "the next request is another matter"


async def test_one_that_drains_gets_nothing_new_but_keeps_what_it_has(store: MemoryStore) -> None:
    async with _world(store) as (proxy, first, second):
        streaming = asyncio.create_task(proxy.events())
        kept = await first.next_generate()
        first.step(kept.id, token_ids("hel"))
        asking = asyncio.create_task(proxy.chat())
        first.fail((await first.next_generate()).id, "draining")
        frame = await second.next_generate()
        second.end(frame.id)
        assert (await asking).status_code == 200
        assert (await proxy.client.get("/ready")).json()["workers_ready"] == 1
        second.script = says("hi")
        assert (await proxy.chat()).headers["x-prefixcache-worker"] == "second"
        first.step(kept.id, token_ids("lo"))
        first.end(kept.id)
        assert text_of(await streaming) == "hello"
        first.drop()
        await proxy.ready(2)


async def test_where_all_drain_it_is_unavailable(store: MemoryStore) -> None:
    async with _world(store) as (proxy, first, second):
        asking = asyncio.create_task(proxy.chat())
        first.fail((await first.next_generate()).id, "draining")
        second.fail((await second.next_generate()).id, "draining")
        assert (await asking).status_code == 503


@pytest.mark.parametrize("kind", ["overloaded", "draining"])
async def test_a_choice_goes_elsewhere_alone(store: MemoryStore, kind: FailKind) -> None:
    async with _world(store) as (proxy, first, second):
        asking = asyncio.create_task(proxy.chat(n=3))
        frames = [await first.next_generate() for _ in range(3)]
        first.fail(frames[1].id, kind)
        frame = await second.next_generate()
        assert (frame.choice, frame.sampling) == (1, frames[1].sampling)
        for worker, each, text in ((first, frames[0], "a"), (second, frame, "b"), (first, frames[2], "c")):
            worker.step(each.id, token_ids(text))
            worker.end(each.id)
        answer = await asking
        assert [choice["message"]["content"] for choice in answer.json()["choices"]] == ["a", "b", "c"]
        assert answer.headers["x-prefixcache-worker"] == "first, second"
        assert proxy.metric("prefixcache_num_requests_running") == 0
        placed, settled = (
            proxy.metric("prefixcache_pending_claims_total", change=change) for change in ("placed", "settled")
        )
        assert placed == settled


@pytest.mark.parametrize("kind", ["overloaded", "draining", "worker_fault"])
async def test_after_the_first_token_another_one_goes_on(store: MemoryStore, kind: FailKind) -> None:
    async with _world(store) as (proxy, first, second):
        streaming = asyncio.create_task(proxy.events(stream_options={"include_usage": True}))
        frame = await first.next_generate()
        first.started(frame.id, cached_tokens=3)
        first.step(frame.id, token_ids("hel"))
        await eventually(lambda: proxy.metric("prefixcache_time_to_first_token_seconds_count") == 1)
        first.fail(frame.id, kind)
        rest = await second.next_generate()
        assert tuple(unpack_tokens(rest.output_ids)) == token_ids("hel")
        second.step(rest.id, token_ids("lo"), index=len(token_ids("hel")))
        second.end(rest.id, output_tokens=len(token_ids("lo")))
        events = await streaming
        assert text_of(events) == "hello" and events[-1] == "[DONE]"
        usage = events[-2]["usage"]
        assert usage["completion_tokens"] == len(token_ids("hel")) + len(token_ids("lo"))
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3
        assert proxy.metric("prefixcache_continuations_total", outcome="moved") == 1
        assert proxy.metric("prefixcache_num_requests_running") == 0


async def test_a_wrong_request_is_nobody_elses_matter(store: MemoryStore) -> None:
    async with _world(store) as (proxy, first, second):
        first.script = lambda _: Script(fail="refused")
        for _ in range(WORKER_FAULTS + 1):
            assert (await proxy.chat()).status_code == 400
        assert second.generates == []
        assert proxy.metric("prefixcache_worker_breaker_open") == 0


async def test_a_worker_that_fails_everything_is_passed_over_but_for_trials_until_it_works_again(
    store: MemoryStore,
) -> None:
    """No client sees an error, though all its requests would go there."""
    clock = ManualClock(1_000.0)
    async with _world(store) as (proxy, first, second):
        second.script = says("hi")
        first.script = lambda _: Script(fail="worker_fault")
        for link in proxy.fleet.links:
            link.breaker = FaultBreaker(clock=clock)
            assert link.stream is not None
            link.stream.breaker = link.breaker

        async def ask(times: int) -> int:
            """How many of them the first worker was asked."""
            before = len(first.generates)
            for _ in range(times):
                assert (await proxy.chat()).status_code == 200
            return len(first.generates) - before

        assert await ask(50) == WORKER_FAULTS
        assert proxy.metric("prefixcache_worker_breaker_open", worker="first") == 1
        clock.now += WORKER_TRIAL_FIRST_S
        assert await ask(10) == 1, "a trial"
        clock.now += WORKER_TRIAL_FIRST_S
        assert await ask(10) == 0, "the pause is twice as long"
        first.script = says("hi")
        clock.now += WORKER_TRIAL_FIRST_S
        assert await ask(10) == 10
        assert proxy.metric("prefixcache_worker_breaker_open") == 0


async def test_a_process_that_was_started_anew_is_trusted_at_once(store: MemoryStore) -> None:
    async with _world(store) as (proxy, first, second):
        second.script = says("hi")
        first.script = lambda _: Script(fail="worker_fault")
        for _ in range(WORKER_FAULTS):
            assert (await proxy.chat()).headers["x-prefixcache-worker"] == "second"
        assert proxy.metric("prefixcache_worker_breaker_open", worker="first") == 1
        first.drop()
        await eventually(lambda: first.num_connections == 2)
        await proxy.ready(2)
        assert proxy.metric("prefixcache_worker_breaker_open", worker="first") == 1, "it is the same one still"
        first.script = says("hi")
        first.record = replace(first.record, started_at=first.record.started_at + 1)
        first.drop()
        await eventually(lambda: first.num_connections == 3)
        await proxy.ready(2)
        assert (await proxy.chat()).headers["x-prefixcache-worker"] == "first"
        assert proxy.metric("prefixcache_worker_breaker_open", worker="first") == 0


async def test_where_all_workers_fail_they_are_used_all_the_same(store: MemoryStore) -> None:
    async with _world(store) as (proxy, first, second):
        for worker in (first, second):
            worker.script = lambda _: Script(fail="worker_fault")
        for _ in range(2 * WORKER_FAULTS):
            assert (await proxy.chat()).status_code == 502
        assert len(first.generates) == len(second.generates) == 2 * WORKER_FAULTS
        first.script = says("hi")
        assert (await proxy.chat()).status_code == 200
