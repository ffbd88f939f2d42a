"""Class failover-retry: who fails is remembered, and no text is told twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.limits import WORKER_FAULTS, WORKER_TRIAL_FIRST_S
from prefixcache.protocol import Generate
from tests.cases.catalogue import Placeholders, call_of, calls, changed
from tests.cases.outcome import Outcome, send
from tests.support.answer_bytes import chat_answer, chat_events, chunk, stream_head
from tests.support.bare_client import ask, post_bytes
from tests.support.engine_proxy import engine_answers, engine_proxy
from tests.support.fake_worker import FakeWorker, Script, says
from tests.support.memory_store import MemoryStore
from tests.support.program_fleet import all_connected, running_fleet
from tests.support.proxy_harness import RunningProxy, running_proxy
from tests.support.raw_http import raw_connection
from tests.support.scripted_engine import ReceivedRequest, Step, reset
from tests.support.seen_answer import SeenAnswer
from tests.support.sim_oracle import SimOracle
from tests.support.valkey import Server
from tests.support.waiting import eventually

MODEL = "tiny"
NUM_REQUESTS = 50
PROMPT = "the answer is in the question and " * 60


@asynccontextmanager
async def _holder_and_other() -> AsyncIterator[tuple[RunningProxy, FakeWorker, FakeWorker]]:
    """Two workers, of which the first claims the prompt for good."""
    store = MemoryStore(lease_s=float("inf"))
    async with (
        FakeWorker.open(store, worker_id="holder", script=says("hi")) as holder,
        FakeWorker.open(store, worker_id="other", script=says("hi")) as other,
        running_proxy(store) as proxy,
    ):
        await proxy.ready(2)
        await _ask(proxy)
        [frame] = [*holder.generates, *other.generates]
        await store.index(holder.record.namespace).apply(holder.record.incarnation, 1, _chain(frame), ())
        yield proxy, holder, other


def _chain(frame: Generate) -> list[int]:
    return index_hashes(block_hashes(frame.root, frame.prompt_ids, 16), 4)


async def _ask(proxy: RunningProxy, **fields: object) -> Outcome:
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    return await send(proxy.client, call_of({"method": "POST", "path": "/v1/chat/completions", "body": body}, **fields))


@pytest.mark.parametrize("stream", [False, True])
async def test_rw_160_a_worker_that_fails_every_request_is_left_alone(stream: bool) -> None:
    async with _holder_and_other() as (proxy, holder, _other):
        await eventually(lambda: _goes_to(proxy, "holder"))
        holder.script = lambda frame: Script(fail="worker_fault")
        num_before = len(holder.generates)
        began = asyncio.get_running_loop().time()
        outcomes = [await _ask(proxy, stream=stream) for _ in range(NUM_REQUESTS)]
        took_s = asyncio.get_running_loop().time() - began
        assert [outcome.status for outcome in outcomes] == [200] * NUM_REQUESTS
        assert {outcome.text for outcome in outcomes} == {"hi"}
        attempts = len(holder.generates) - num_before
        print(f"{attempts} attempts in {took_s:.2f} s")
        assert WORKER_FAULTS <= attempts <= WORKER_FAULTS + took_s / WORKER_TRIAL_FIRST_S
        assert proxy.metric("prefixcache_worker_breaker_open", worker="holder") == 1
        holder.script = says("hi")
        await eventually(lambda: _goes_to(proxy, "holder"), 10 * WORKER_TRIAL_FIRST_S)
        assert proxy.metric("prefixcache_worker_breaker_open", worker="holder") == 0
        again = [(await _ask(proxy)).headers["x-prefixcache-worker"] for _ in range(20)]
        assert again.count("holder") >= 5, "by now the other one has the prompt as well"


async def _goes_to(proxy: RunningProxy, worker_id: str) -> bool:
    return (await _ask(proxy)).headers["x-prefixcache-worker"] == worker_id


async def test_rw_160_an_engine_that_breaks_every_connection() -> None:
    """One request after the other is answered by another one; whether it is up again, its probes tell."""

    def breaks(_: ReceivedRequest) -> Sequence[Step]:
        return (reset(),)

    def answers(_: ReceivedRequest) -> Sequence[Step]:
        return (chat_answer("hi", model=MODEL),)

    async with engine_proxy(engine_answers(MODEL, then=breaks), engine_answers(MODEL, then=answers)) as fleet:
        outcomes = [await _ask(fleet.proxy) for _ in range(NUM_REQUESTS)]
        assert [outcome.status for outcome in outcomes] == [200] * NUM_REQUESTS
        assert {outcome.text for outcome in outcomes} == {"hi"}


NUM_CHUNKS_BEFORE = 10


async def test_rw_161_no_text_comes_twice(valkey: Server, tmp_path: Path) -> None:
    """The answer goes on on the other worker, and is that of an undisturbed run."""
    async with running_fleet(tmp_path, valkey.url) as fleet:
        workers = {name: fleet.start_worker(name, "--model", MODEL) for name in ("w0", "w1")}
        proxy = await fleet.start_proxy("proxy")
        await all_connected(workers.values(), [proxy])
        (call,) = calls("RW-161", Placeholders(model=MODEL))
        call = changed(call, ignore_eos=True, stream_options={"include_usage": True})
        async with raw_connection(int(proxy.url.rpartition(":")[2])) as connection:
            connection.send(post_bytes(call.path, call.content))
            status, headers = await connection.head()
            chunks = [await connection.chunk() for _ in range(NUM_CHUNKS_BEFORE)]
            workers[headers["x-prefixcache-worker"]].kill()
            chunks += await connection.chunks()
        seen = SeenAnswer.of_stream(b"".join(chunks))
        assert (status, seen.is_done, seen.error) == (200, True, None)
        assert seen.differs(SimOracle().answers(call.body)) is None
        assert "goes on at worker" in proxy.log.read_text()


async def test_rw_161_no_text_of_an_engine_comes_twice() -> None:
    """Nobody can go on with it: an error event, the connection is cut as the engine's was, and no second attempt."""
    (call,) = calls("RW-161", Placeholders(model=MODEL))
    events = [chunk(event) for event in chat_events(["one "] * 200, model=MODEL)[: NUM_CHUNKS_BEFORE + 1]]
    async with engine_proxy(engine_answers(MODEL), engine_answers(MODEL)) as fleet:
        for engine in fleet.engines:
            engine.script(stream_head(), *events, reset())
        reply = await ask(fleet.proxy.port, post_bytes(call.path, call.content))
        seen = SeenAnswer.of_stream(reply.content)
        assert (reply.end, reply.status, seen.is_done) == ("cut", 200, False)
        assert seen.choices[0].text == "one " * NUM_CHUNKS_BEFORE
        assert seen.error is not None and seen.error["code"] == "engine_fault"
        assert len(fleet.asked()) == 1
