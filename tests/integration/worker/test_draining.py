"""A worker that is told to end: takes nothing new, says so, finishes what it has, hands back what takes too long."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from prefixcache.cli.children import spawn
from prefixcache.cli.programs import program_command
from prefixcache.load import WorkerLoad
from prefixcache.protocol import Abort, Beat, End, Fail
from prefixcache.registry import WorkerRecord
from prefixcache.store import RedisStore
from tests.support.memory_store import MemoryStore
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner, expected_output
from tests.support.stream_client import StreamClient, connected
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker
from worker.engine import Engine, StepOutput
from worker.engine_load import EngineLoad

PROMPT = list(range(40))
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0
FOREVER = 8_000
"""Tokens that take minutes."""


@asynccontextmanager
async def draining(running: RunningWorker) -> AsyncIterator[asyncio.Task[None]]:
    """The drain of a worker, once it has begun."""
    task = asyncio.create_task(running.worker.drain())
    await eventually(lambda: task.done() or not running.engine.is_serving)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_it_has_goes_on_and_what_comes_is_turned_away() -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        running.runner.pause()
        client.send(generate("runs", PROMPT), generate("waits", [7]))
        await eventually(lambda: running.engine.load.running + running.engine.load.waiting == 2)
        async with draining(running) as drain:
            client.send(generate("late", [9]))
            fail = await client.ended("late")
            assert isinstance(fail, Fail) and fail.kind == "draining"
            assert not drain.done()
            running.runner.resume()
            assert isinstance(await client.ended("runs"), End) and isinstance(await client.ended("waits"), End)
            assert client.tokens("runs") == expected_output(PROMPT, 4, vocab_size=1_000)
            await asyncio.wait_for(drain, 5)


@pytest.mark.parametrize("has_failed", [False, True])
async def test_its_last_word_is_that_it_leaves_unless_its_engine_has_failed(
    has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it does not drain."""
    monkeypatch.setattr("worker.server.BEAT_INTERVAL_S", 1_000.0)
    async with AsyncExitStack() as around:
        with pytest.raises(RuntimeError, match="broken") if has_failed else nullcontext():
            async with running_worker() as running:
                streaming = connected(running.address, namespace=running.record.namespace)
                client = await around.enter_async_context(streaming)
                if has_failed:
                    monkeypatch.setattr(Engine, "failure", RuntimeError("broken"))
        await client.closed()
    beats = [frame.draining for frame in client.received if isinstance(frame, Beat)]
    assert any(beats) is not has_failed


async def test_it_says_so_at_once_in_a_beat_and_in_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server.BEAT_INTERVAL_S", 1_000.0)
    store = MemoryStore()
    async with running_worker(store=store) as running:
        index, incarnation = store.index(running.record.namespace), running.record.incarnation

        async def load() -> WorkerLoad | None:
            return (await index.exchange_loads("a" * 16, {}, [incarnation]))[incarnation].worker

        async with connected(running.address, namespace=running.record.namespace) as client:
            running.runner.pause()
            client.send(generate("a", PROMPT))
            await eventually(lambda: running.engine.load.running)
            async with draining(running):
                assert (await client.beat()).draining
                await eventually(load)
                first = await load()
                assert first is not None and first.is_draining

                async def is_told_again() -> bool:
                    told = await load()
                    return told is not None and told.version > first.version and told.is_draining

                await eventually(is_told_again)
                async with aiohttp.ClientSession() as http, http.get(f"http://{running.address}/health") as health:
                    assert health.status == 503 and not (await health.json())["serving"]
                running.runner.resume()
                await client.ended("a")


async def test_beats_of_one_that_stays_do_not_say_that_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server.BEAT_INTERVAL_S", 0.01)
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        assert not (await client.beat()).draining
        async with draining(running):
            async with asyncio.timeout(5):
                while not (await client.beat()).draining:
                    pass
            assert (await client.beat()).draining, "every one from now on"


async def test_one_without_requests_is_done_at_once() -> None:
    async with running_worker() as running:
        await asyncio.wait_for(running.worker.drain(), 5)


@pytest.mark.parametrize("how", ["aborted", "proxy gone"])
async def test_requests_that_are_given_up_do_not_hold_it(how: str) -> None:
    runner = ScriptedRunner(step_delay_s=0.001)
    async with (
        running_worker(runner) as running,
        connected(running.address, namespace=running.record.namespace) as client,
    ):
        client.send(generate("a", PROMPT, max_tokens=3_000))
        await eventually(lambda: running.engine.load.running)
        async with draining(running) as drain:
            await eventually(lambda: running.runner.num_steps > 3)
            assert not drain.done()
            if how == "aborted":
                client.send(Abort(id="a"))
            else:
                await client.close()
            await asyncio.wait_for(drain, 5)


async def test_an_output_older_than_the_last_request_does_not_end_the_drain() -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        running.runner.pause()
        client.send(generate("a", PROMPT))
        await eventually(lambda: running.engine.load.running)
        async with draining(running) as drain:
            idle = EngineLoad(step=1, running=0, waiting=0, prefilling=0)
            running.worker.server.deliver(StepOutput(events=[], load=idle, index_changed=False))
            await asyncio.sleep(0.01)
            assert not drain.done()
            running.runner.resume()
            await client.ended("a")
            await asyncio.wait_for(drain, 5)


# --- the program ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A simulated worker of 100 tokens a second, and a proxy's stream to it."""

    process: subprocess.Popen[bytes]
    client: StreamClient
    log: Path

    def tell(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def said(self, words: str) -> None:
        await eventually(lambda: words in self.log.read_text())

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, END_TIMEOUT_S)


@asynccontextmanager
async def program(valkey: Server, log: Path, *flags: str) -> AsyncIterator[Program]:
    costs = ["--sim-step-ms", "0", "--sim-itl-ms", "10", "--sim-itl-per-sequence-ms", "0"]
    command = [*program_command("worker"), "--runner", "sim", "--redis", valkey.url, *costs, *flags]
    with log.open("wb") as output:
        process = spawn(command, environment=dict(os.environ), stderr=output)
    try:
        await eventually(lambda: " ready at " in log.read_text(), START_TIMEOUT_S)
        async with RedisStore.open(valkey.url) as store:
            (record,) = await store.registry().live_workers()
        async with connected(record.address, namespace=record.namespace) as client:
            yield Program(process=process, client=client, log=log)
    finally:
        process.kill()
        process.wait()


async def running_request(worker: Program, max_tokens: int) -> None:
    """Returns when its first tokens are there."""
    worker.client.send(generate("a", [*b"Tell me a story."], max_tokens=max_tokens))
    async with asyncio.timeout(END_TIMEOUT_S):
        while len(worker.client.tokens("a")) < 3:
            await worker.client.beat()


async def registered(valkey: Server) -> list[WorkerRecord]:
    async with RedisStore.open(valkey.url) as store:
        return list(await store.registry().live_workers())


async def test_told_to_end_it_ends_with_its_last_request(valkey: Server, tmp_path: Path) -> None:
    async with program(valkey, tmp_path / "log") as worker:
        await running_request(worker, 200)
        worker.tell()
        await worker.said("drains")
        assert len(await registered(valkey)) == 1, "it is there until it has finished"
        end = await worker.client.ended("a", END_TIMEOUT_S)
        assert isinstance(end, End) and end.usage.output_tokens == 200
        assert len(worker.client.tokens("a")) == 200
        assert await worker.ended() == 0
        assert await registered(valkey) == []
    assert "shuts down with 0 requests in hand" in worker.log.read_text()


async def test_what_takes_longer_is_handed_back_with_all_its_tokens(valkey: Server, tmp_path: Path) -> None:
    async with program(valkey, tmp_path / "log", "--drain-timeout", "0.5") as worker:
        await running_request(worker, FOREVER)
        worker.tell()
        fail = await worker.client.ended("a", END_TIMEOUT_S)
        assert isinstance(fail, Fail) and fail.kind == "draining"
        assert await worker.ended() == 0
        entries = worker.client.entries("a")
        assert [entry.index for entry in entries] == list(range(len(entries))), "it goes on from there elsewhere"
    assert "shuts down with 1 requests in hand" in worker.log.read_text()


async def test_without_a_drain_it_hands_back_at_once(valkey: Server, tmp_path: Path) -> None:
    async with program(valkey, tmp_path / "log", "--drain-timeout", "0") as worker:
        await running_request(worker, FOREVER)
        worker.tell()
        fail = await worker.client.ended("a")
        assert isinstance(fail, Fail) and fail.kind == "draining"
        assert await worker.ended() == 0
    assert "drains" not in worker.log.read_text()


async def test_told_a_second_time_it_does_not_wait_any_longer(valkey: Server, tmp_path: Path) -> None:
    async with program(valkey, tmp_path / "log", "--drain-timeout", "600") as worker:
        await running_request(worker, FOREVER)
        worker.tell()
        await worker.said("drains")
        worker.tell()
        fail = await worker.client.ended("a", END_TIMEOUT_S)
        assert isinstance(fail, Fail) and fail.kind == "draining"
        assert await worker.ended() == 0
