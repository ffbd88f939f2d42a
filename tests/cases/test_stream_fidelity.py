"""Class stream-fidelity: a stream says the truth about how it ended, whatever the network and the worker do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from prefixcache.protocol import End, FailKind, Frame, Generate, Started, Step, StepEntry, Usage, encode
from prefixcache.store import RedisStore
from proxy import pulse
from tests.cases.catalogue import Call, Placeholders, calls, changed
from tests.cases.official_client import read_to_the_error
from tests.cases.outcome import Outcome, send
from tests.cases.world import open_world
from tests.support.fake_worker import FakeWorker, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.valkey import Server
from tests.support.waiting import eventually

SILENCE_S = 1.0
MODEL = "tiny"
PLACEHOLDERS = Placeholders(model=MODEL)
NUM_CHUNKS_BEFORE = 5
LONG_WORD = " assistant"
"""One token."""
LARGE_EVENT_BYTES = 8_000_000


@asynccontextmanager
async def _fake(max_model_len: int = 4096) -> AsyncIterator[tuple[FakeWorker, RunningProxy]]:
    """A worker that says what the test tells it, behind a proxy that holds nothing back."""
    store = MemoryStore(lease_s=float("inf"))
    async with FakeWorker.open(store, max_model_len=max_model_len) as worker, running_proxy(store, held_s=0.0) as proxy:
        await proxy.ready()
        yield worker, proxy


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker counts as lost after SILENCE_S without a frame."""
    monkeypatch.setattr(pulse, "WORKER_SILENCE_S", SILENCE_S)


def _die(worker: FakeWorker) -> None:
    worker.drop()


def _end(worker: FakeWorker) -> None:
    worker.drop(cleanly=True)


def _garbage(worker: FakeWorker) -> None:
    worker.send_bytes(b"\x00\x00\x00\x05hello")


def _stall(worker: FakeWorker) -> None:
    """Nothing is said any more."""
    worker.is_mute = True


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("fault", [_die, _end, _garbage, _stall])
async def test_rw_060_a_worker_lost_in_the_middle(fault: Callable[[FakeWorker], None]) -> None:
    """Where no other one can go on with it in time; else its client would see nothing."""
    async with _fake() as (worker, proxy):
        (call,) = calls("RW-060", PLACEHOLDERS)
        async with openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client:
            beating = asyncio.create_task(_beat(worker))
            streaming = asyncio.create_task(read_to_the_error(client, call.body))
            frame = await worker.next_generate()
            worker.started(frame.id)
            for token_id in token_ids("hello" * NUM_CHUNKS_BEFORE):
                worker.step(frame.id, [token_id])
            await eventually(lambda: _num_gaps(proxy) == NUM_CHUNKS_BEFORE - 1)
            beating.cancel()
            fault(worker)
            async with asyncio.timeout(SILENCE_S + 3):
                text, reasons, error = await streaming
        assert text == "hello" * NUM_CHUNKS_BEFORE
        assert reasons == [None] * len(reasons)
        assert isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError)
        assert error.code == "unavailable"
        assert proxy.metric("prefixcache_requests_total", code="503") == 1
        assert proxy.metric("prefixcache_requests_total", code="200") == 0


async def test_rw_060_a_worker_killed_in_the_middle(valkey: Server) -> None:
    async with (
        RedisStore.open(valkey.url) as store,
        _simulated_worker(valkey) as worker,
        running_proxy(store, held_s=0.0) as proxy,
    ):
        await eventually(lambda: proxy.fleet.num_ready == 1, timeout_s=20)
        (call,) = calls("RW-060", Placeholders(model=MODEL))
        async with openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client:
            streaming = asyncio.create_task(read_to_the_error(client, call.body))
            await eventually(lambda: _num_gaps(proxy) >= NUM_CHUNKS_BEFORE)
            worker.kill()
            async with asyncio.timeout(3):
                text, reasons, error = await streaming
        assert text and reasons == [None] * len(reasons)
        assert isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError)
        assert proxy.metric("prefixcache_requests_total", code="503") == 1


def _num_gaps(proxy: RunningProxy) -> float:
    """Tokens so far, but for the first."""
    return proxy.metric("prefixcache_inter_token_latency_seconds_count")


@asynccontextmanager
async def _simulated_worker(valkey: Server) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker process of its own, which needs no model."""
    arguments = ["--runner", "sim", "--model", MODEL, "--redis", valkey.url]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "worker", *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _beat(worker: FakeWorker) -> None:
    while True:
        worker.beat()
        await asyncio.sleep(SILENCE_S / 8)


@pytest.mark.parametrize(
    ("place", "status", "code"),
    [(0, 404, "model_not_found"), (1, 400, None), ("too long", 400, "context_length_exceeded")],
)
async def test_rw_061_refusals_before_the_first_token(place: int | str, status: int, code: str | None) -> None:
    async with _fake() as (worker, proxy):
        found = calls("RW-061", PLACEHOLDERS)
        long = [{"role": "user", "content": PLACEHOLDERS.text(5000, seed="too long")}]
        call = found[place] if isinstance(place, int) else _of_case_061(messages=long)
        whole, streamed = await _both_modes(proxy, call)
        for outcome in (whole, streamed):
            assert (outcome.status, outcome.error["code"]) == (status, code)
        assert whole.error == streamed.error
        assert worker.generates == []


@pytest.mark.parametrize(
    ("kind", "num_asked", "status", "code"),
    [("overloaded", 2, 429, "rate_limit_exceeded"), ("draining", 1, 503, "unavailable")],
)
async def test_rw_061_a_worker_that_takes_no_more(kind: FailKind, num_asked: int, status: int, code: str) -> None:
    """One that drains is not asked again."""
    async with _fake() as (worker, proxy):
        asking = asyncio.create_task(_both_modes(proxy, _of_case_061()))
        for _ in range(num_asked):
            worker.fail((await worker.next_generate()).id, kind)
        for outcome in await asking:
            assert (outcome.status, outcome.error["code"]) == (status, code)
            assert int(outcome.headers["retry-after"]) >= 1


async def test_rw_061_no_worker_can_be_reached() -> None:
    store = MemoryStore(lease_s=float("inf"))
    async with FakeWorker.open(store) as worker:
        record = worker.record
    await store.registry().announce(record)
    async with running_proxy(store, held_s=0.0) as proxy:
        await eventually(lambda: proxy.fleet.links)
        for outcome in await _both_modes(proxy, _of_case_061()):
            assert outcome.status in (502, 503) and outcome.error["type"] == "server_error"
            assert int(outcome.headers["retry-after"]) >= 1


def _of_case_061(**fields: Any) -> Call:
    return changed(calls("RW-061", PLACEHOLDERS)[0], model=MODEL, **fields)


async def _both_modes(proxy: RunningProxy, call: Call) -> list[Outcome]:
    """The same request whole and streamed."""
    return [await send(proxy.client, changed(call, stream=stream)) for stream in (False, True)]


SPEECH = "早安 🐢🎈 👩‍🚀 naïve — ok"


@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
async def test_rw_062_cuts_anywhere(step_bytes: int) -> None:
    """One byte a segment, then everything in one: the same text and the same counts."""
    async with _fake() as (worker, proxy):
        (call,) = calls("RW-062", PLACEHOLDERS)
        asking = asyncio.create_task(send(proxy.client, changed(call, stream_options={"include_usage": True})))
        frame = await worker.next_generate()
        ids = token_ids(SPEECH)
        await _send_in_segments(worker, _answer_frames(frame, [(id,) for id in ids]), step_bytes)
        outcome = await asking
        assert outcome.text == SPEECH and "\ufffd" not in outcome.text
        assert outcome.usage["completion_tokens"] == len(ids)
        assert proxy.metric("prefixcache_generation_tokens_total") == len(ids)


async def _send_in_segments(worker: FakeWorker, frames: Sequence[Frame], step_bytes: int) -> None:
    data = b"".join(map(encode, frames))
    for start in range(0, len(data), step_bytes):
        worker.send_bytes(data[start : start + step_bytes])
        await asyncio.sleep(0)


def _answer_frames(frame: Generate, steps: Sequence[Sequence[int]]) -> list[Frame]:
    """A whole answer, one step frame for each of `steps`."""
    frames: list[Frame] = [Started(id=frame.id, cached_tokens=0)]
    place = 0
    for ids in steps:
        frames.append(Step(entries=(StepEntry(id=frame.id, index=place, ids=tuple(ids)),)))
        place += len(ids)
    usage = Usage(
        cached_tokens=0,
        computed_tokens=len(frame.prompt_ids) // 4,
        output_tokens=place,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        preemptions=0,
    )
    return [*frames, End(id=frame.id, reason="stop", usage=usage)]


async def test_rw_064_usage_only_when_asked_for(valkey: Server) -> None:
    async with open_world(valkey) as world:
        plain, asked = await world.play("RW-064")
        assert plain.events[-1] == asked.events[-1] == "[DONE]"
        assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in plain.chunks)
        *others, last = asked.chunks
        assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in others)
        assert last["choices"] == []
        counts = {name: last["usage"][name] for name in ("completion_tokens", "total_tokens")}
        assert counts == {"completion_tokens": 4, "total_tokens": len(world.prompts[1]) + 4}
        assert last["usage"]["prompt_tokens"] == len(world.prompts[1])


@pytest.mark.usefixtures("short_silence")
async def test_rw_066_a_long_prefill(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step takes longer than any silence that is allowed; the worker's beats go on, and nothing is cut.

    There are no keepalives: not a byte comes before the first token.
    """
    monkeypatch.setattr("worker.server.BEAT_INTERVAL_S", SILENCE_S / 4)
    async with open_world(valkey) as world, raw_connection(world.proxy.port) as connection:
        (worker,) = world.workers
        (call,) = world.calls("RW-066")
        worker.runner.pause()
        connection.send(post(call.path, changed(call, max_tokens=3).content))
        await eventually(lambda: world.proxy.metric("prefixcache_num_requests_running") == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * SILENCE_S):
                await connection.reader.read(1)
        worker.runner.resume()
        status, _ = await connection.head()
        assert status == 200
        assert (await connection.chunks())[-1].endswith(b"data: [DONE]\n\n")


async def test_rw_068_a_very_large_event() -> None:
    """Eight megabytes of text in one event, as after a stall, then ordinary ones."""
    async with _fake(max_model_len=1 << 24) as (worker, proxy):
        (call,) = calls("RW-068", PLACEHOLDERS)
        asking = asyncio.create_task(send(proxy.client, call))
        frame = await worker.next_generate()
        (word,) = token_ids(LONG_WORD)
        many = [word] * (LARGE_EVENT_BYTES // len(LONG_WORD))
        await _send_in_segments(worker, _answer_frames(frame, [many, token_ids("and the end")]), 1 << 20)
        outcome = await asking
        assert outcome.events[-1] == "[DONE]"
        assert outcome.text == LONG_WORD * len(many) + "and the end"
        longest = max(len(chunk["choices"][0]["delta"].get("content") or "") for chunk in outcome.chunks)
        assert longest == LARGE_EVENT_BYTES
