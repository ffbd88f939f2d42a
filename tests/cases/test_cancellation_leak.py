"""Class cancellation-leak: a client that leaves takes all with it that was there for it, wherever its request is."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefixcache.limits import INDEX_CONNECTIONS
from tests.cases.catalogue import Call, Placeholders, calls, changed
from tests.cases.world import MODEL, World, open_world
from tests.support.answer_bytes import chat_events, chunk, stream_head
from tests.support.bare_client import Leave, ask, post_bytes
from tests.support.engine_proxy import engine_answers, engine_proxy
from tests.support.raw_http import RawConnection, raw_connection
from tests.support.redis_relay import redis_relay
from tests.support.scripted_engine import ReceivedRequest, ScriptedConnection, Step
from tests.support.seeds import seeded
from tests.support.valkey import Server
from tests.support.waiting import eventually

STEP_S = 0.01
STOPS_WITHIN_S = 1.0
STOPS_WITHIN_TOKENS = 30
"""At a step of STEP_S, a third of that second."""


def _request(call: Call) -> bytes:
    return post_bytes(call.path, call.content)


def _goodbye(connection: RawConnection, how: str) -> None:
    if how == "rst":
        connection.reset()
    else:
        connection.writer.transport.abort()


def _num_generated(world: World) -> float:
    return sum(worker.runner.num_steps for worker in world.workers)


async def _stops(world: World, num_at_goodbye: float) -> None:
    left_at = time.monotonic()
    await eventually(lambda: world.num_running == 0, STOPS_WITHIN_S)
    print(f"stopped {time.monotonic() - left_at:.3f} s and {_num_generated(world) - num_at_goodbye:g} steps later")
    assert _num_generated(world) - num_at_goodbye <= STOPS_WITHIN_TOKENS
    assert [worker.engine._pool.num_in_use for worker in world.workers] == [0] * len(world.workers)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_rw_050_a_stream_that_is_closed(valkey: Server, how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "proxy.access_log")
    async with open_world(valkey, num_workers=2, step_delay_s=STEP_S, max_model_len=4_096) as world:
        (call,) = world.calls("RW-050")
        async with raw_connection(world.proxy.port) as connection:
            connection.send(_request(call))
            await connection.head()
            for _ in range(3):
                await connection.chunk()
            _goodbye(connection, how)
        await _stops(world, _num_generated(world))
        await eventually(lambda: world.proxy.metric("prefixcache_requests_total", code="499") == 1)
        assert any(" 499 " in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_rw_050_a_stream_of_an_engine_that_is_closed(how: str) -> None:
    """Its connection to the engine is closed: that is how an engine learns of it."""
    sent = 0

    def then(_: ReceivedRequest) -> Sequence[Step]:
        async def tokens(connection: ScriptedConnection) -> None:
            nonlocal sent
            for event in chat_events(["word "] * 2_000, model=MODEL):
                await connection.send(chunk(event))
                sent += 1
                await asyncio.sleep(STEP_S)

        return stream_head(), tokens

    async with engine_proxy(engine_answers(MODEL, then=then)) as fleet:
        (call,) = calls("RW-050", Placeholders(model=MODEL))
        async with raw_connection(fleet.proxy.port) as connection:
            connection.send(_request(call))
            await connection.head()
            for _ in range(3):
                await connection.chunk()
            _goodbye(connection, how)
        sent_at_goodbye = sent
        await eventually(lambda: fleet.proxy.metric("prefixcache_requests_total", code="499") == 1, STOPS_WITHIN_S)
        await eventually(lambda: len(fleet.engines[0].connections) <= 1, STOPS_WITHIN_S)
        assert sent - sent_at_goodbye <= STOPS_WITHIN_TOKENS
        assert fleet.link(fleet.engines[0]).num_running == fleet.link(fleet.engines[0]).num_waiting == 0


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_rw_051_a_whole_answer_nobody_waits_for(valkey: Server, how: str) -> None:
    async with open_world(valkey, num_workers=2, step_delay_s=STEP_S, max_model_len=4_096) as world:
        (call,) = world.calls("RW-051")
        async with raw_connection(world.proxy.port) as connection:
            connection.send(_request(call))
            await asyncio.sleep(1.0)  # as the case has it
            assert world.num_running == 1
            _goodbye(connection, how)
        await _stops(world, _num_generated(world))
        await eventually(lambda: world.proxy.metric("prefixcache_num_requests_running") == 0)


NUM_REQUESTS = 200
NUM_LATER = 100
"""So many that chance alone does not skew them: four standard deviations."""


async def test_rw_053_half_of_the_clients_leave_at_any_point(valkey: Server) -> None:
    random = seeded("RW-053")
    async with open_world(valkey, num_workers=2, step_delay_s=0.002, num_blocks=1_024) as world:

        async def one(number: int) -> str:
            call = _chat(world.placeholders.text(60, seed=f"053 {number}"), stream=random.random() < 0.5, max_tokens=20)
            await asyncio.sleep(random.uniform(0.0, 2.0))
            leave = Leave(after_s=random.uniform(0.0, 0.1), how=random.choice(["fin", "rst"]))
            return (await ask(world.proxy.port, _request(call), leave=leave if number % 2 else None)).end

        ends = Counter(await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS))))
        print(dict(ends))
        assert ends["complete"] >= NUM_REQUESTS / 2 and ends["left"] > NUM_REQUESTS / 8
        assert ends.keys() == {"complete", "left"}
        await eventually(lambda: world.num_running == 0)
        gauges = ("prefixcache_num_requests_waiting", "prefixcache_num_requests_running")
        await eventually(lambda: not any(map(world.proxy.metric, gauges)))
        assert all(link.ledger.is_idle for link in world.proxy.fleet.links)
        later = [
            _chat(world.placeholders.text(60, seed=f"later {number}"), max_tokens=1) for number in range(NUM_LATER)
        ]
        shares = Counter([(await world.send(call)).headers["x-prefixcache-worker"] for call in later])
        assert min(shares["w0"], shares["w1"]) >= 0.3 * NUM_LATER, shares


def _chat(text: str, **fields: object) -> Call:
    call = Call(method="POST", path="/v1/chat/completions", content=b"{}")
    return changed(call, model=MODEL, messages=[{"role": "user", "content": text}], **fields)


DELAY_S = 0.05
NUM_LEAVING = 500
AT_ONCE = 10
NUM_WARM = 8
"""Prefixes, of different lengths: whoever got another one's answer would predict a wrong number."""


async def test_rw_055_calls_to_redis_that_nobody_waits_for(valkey: Server) -> None:
    random = seeded("RW-055")
    async with redis_relay(valkey.url) as relay:
        slow = replace(valkey, url=f"redis://127.0.0.1:{relay.port}")
        async with open_world(slow, num_workers=2, num_blocks=2_048, max_model_len=4_096) as world:
            warm = [
                _chat(world.placeholders.text(100 + 70 * number, seed=f"warm {number}"), max_tokens=1)
                for number in range(NUM_WARM)
            ]
            for call in warm:
                await world.send(call)
            known: dict[bytes, int] = {}

            async def all_known() -> bool:
                outcomes = [await world.send(call) for call in warm]
                known.update({call.content: each.hit_tokens for call, each in zip(warm, outcomes, strict=True)})
                return all(outcome.hit_tokens > outcome.cached_tokens - 64 for outcome in outcomes)

            await eventually(all_known, 10.0)
            assert len(set(known.values())) == NUM_WARM
            relay.delay_s = DELAY_S

            async def one(number: int) -> None:
                call = _chat(world.placeholders.text(80 + number, seed=f"leaves {number}"), max_tokens=1)
                await asyncio.sleep(random.uniform(0.0, 3.0))
                leave = Leave(after_s=random.uniform(0.0, 2 * DELAY_S), how="fin")
                await ask(world.proxy.port, _request(call), leave=leave)

            await asyncio.gather(*(one(number) for number in range(NUM_LEAVING)))
            assert world.proxy.metric("prefixcache_requests_total", code="499") > NUM_LEAVING / 4
            await eventually(lambda: world.num_running == 0)
            asked = [warm[number % NUM_WARM] for number in range(NUM_REQUESTS)]
            for start in range(0, NUM_REQUESTS, AT_ONCE):
                some = asked[start : start + AT_ONCE]
                outcomes = await asyncio.gather(*(world.send(call) for call in some))
                assert [outcome.status for outcome in outcomes] == [200] * len(some)
                assert [outcome.hit_tokens for outcome in outcomes] == [known[call.content] for call in some]
            assert relay.num_accepted <= 3 * INDEX_CONNECTIONS, "of the proxy and both workers; none was thrown away"
            relay.delay_s = 0.0
