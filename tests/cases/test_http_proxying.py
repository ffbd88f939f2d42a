"""Class http-proxying: bodies, connections and times that a proxy's HTTP library would limit by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from prefixcache.limits import ENGINE_KEEP_ALIVE_S, MAX_BODY_BYTES
from proxy.engines.http_pool import EngineTimeouts, HttpPool, ResponseHandle
from tests.cases.catalogue import Call, Placeholders, calls, without
from tests.cases.outcome import send
from tests.cases.world import open_world
from tests.support.answer_bytes import LAST_CHUNK, chat_answer, chat_events, chunk, stream_head
from tests.support.engine_proxy import EngineProxy, engine_answers, engine_proxy
from tests.support.proxy_harness import RunningProxy
from tests.support.raw_http import RawConnection, raw_connection
from tests.support.scripted_engine import ReceivedRequest, ScriptedConnection, Step, close, reset
from tests.support.seeds import seeded
from tests.support.valkey import Server

MODEL = "tiny"
MIB = 1024 * 1024
UVICORN_KEEP_ALIVE_S = 5.0
LIMIT_S = 1.0
"""In place of aiohttp's 300 s."""


@asynccontextmanager
async def _front(kind: str, valkey: Server) -> AsyncIterator[RunningProxy]:
    """A proxy of one model, in front of own workers or of a plain engine."""
    if kind == "own workers":
        async with open_world(valkey) as world:
            yield world.proxy
    else:
        async with engine_proxy(engine_answers(MODEL)) as fleet:
            yield fleet.proxy


def _of_case_100(num_bytes: int) -> Call:
    """The case's request as long as told, by blanks behind its opening brace."""
    call = without(calls("RW-100", Placeholders(model=MODEL))[0], "body_size")
    padding = b" " * (num_bytes - len(call.content))
    return Call(method=call.method, path=call.path, content=b"{" + padding + call.content[1:])


@pytest.mark.parametrize("kind", ["own workers", "an engine"])
@pytest.mark.parametrize("num_bytes", [MIB + 1, 16 * MIB, MAX_BODY_BYTES])
async def test_rw_100_a_long_body_passes(valkey: Server, kind: str, num_bytes: int) -> None:
    async with _front(kind, valkey) as proxy:
        call = _of_case_100(num_bytes)
        assert len(call.content) == num_bytes
        outcome = await send(proxy.client, call)
        assert outcome.status == 200, outcome.content


@pytest.mark.parametrize("kind", ["own workers", "an engine"])
async def test_rw_100_a_body_over_the_limit_is_refused_before_it_is_sent(valkey: Server, kind: str) -> None:
    async with _front(kind, valkey) as proxy, raw_connection(proxy.port) as client:
        path = _of_case_100(MIB).path
        client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
        await _is_refused(client)


@pytest.mark.parametrize("kind", ["own workers", "an engine"])
async def test_rw_100_a_chunked_upload_obeys_the_same_limit(valkey: Server, kind: str) -> None:
    async with _front(kind, valkey) as proxy:
        async with raw_connection(proxy.port) as client:
            call = _of_case_100(2 * MIB)
            _begin_chunked(client, call)
            for place in range(0, len(call.content), 64 * 1024):
                client.send(chunk(call.content[place : place + 64 * 1024]))
            client.send(LAST_CHUNK)
            assert (await client.head())[0] == 200
        async with raw_connection(proxy.port) as client:
            _begin_chunked(client, call)
            for _ in range(MAX_BODY_BYTES // MIB + 1):
                client.send(chunk(b" " * MIB))
                await client.writer.drain()
            await _is_refused(client)  # though its end never came


def _begin_chunked(client: RawConnection, call: Call) -> None:
    client.send(f"POST {call.path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())


async def _is_refused(client: RawConnection) -> None:
    status, headers = await client.head()
    assert (status, headers["content-type"].split(";")[0]) == (413, "application/json")
    body = await client.reader.readexactly(int(headers["content-length"]))
    assert b'"code":"request_too_large"' in body and str(MAX_BODY_BYTES).encode() in body


@pytest.fixture
def resent(monkeypatch: pytest.MonkeyPatch) -> list[ResponseHandle]:
    """Requests that met a closing connection."""
    found: list[ResponseHandle] = []
    resend = HttpPool.resend

    def count(pool: HttpPool, handle: ResponseHandle) -> asyncio.Task[None]:
        found.append(handle)
        return resend(pool, handle)

    monkeypatch.setattr(HttpPool, "resend", count)
    return found


async def test_rw_103_a_connection_closed_just_as_it_is_used_again(resent: list[ResponseHandle]) -> None:
    """In place of minutes around a keep-alive time: each connection closes some turns of the loop after its answer."""
    assert ENGINE_KEEP_ALIVE_S < UVICORN_KEEP_ALIVE_S
    random = seeded("keep-alive")

    async def pause(num_turns: int, connection: ScriptedConnection) -> None:
        await connection.turns(num_turns)

    def then(_: ReceivedRequest) -> Sequence[Step]:
        end = random.choice((close(), close(), reset()))
        return chat_answer("hi", model=MODEL), partial(pause, random.randrange(30)), end

    async with engine_proxy(engine_answers(MODEL, then=then)) as fleet:
        for _ in range(300):
            await _asked(fleet, 1)
            for _ in range(random.randrange(10)):
                await asyncio.sleep(0)
        assert len(resent) > 5, "the race was met"


async def test_rw_103_a_burst_after_idle() -> None:
    async with engine_proxy(engine_answers(MODEL)) as fleet:
        (engine,) = fleet.engines
        for _ in range(5):
            await _asked(fleet, 16)
            engine.close_idle()
            await _asked(fleet, 16)


async def _asked(fleet: EngineProxy, num_at_once: int) -> None:
    """No client sees anything of it."""
    answers = await asyncio.gather(*(fleet.chat(model=MODEL) for _ in range(num_at_once)))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]


async def test_rw_105_nothing_limits_the_whole_of_a_stream() -> None:
    """One chunk every twentieth of each limit, for longer than any of them."""
    events = chat_events([f"{number} " for number in range(30)], model=MODEL)

    async def slowly(connection: ScriptedConnection) -> None:
        for event in events:
            await asyncio.sleep(LIMIT_S / 20)
            await connection.send(chunk(event))
        await connection.send(LAST_CHUNK)

    timeouts = EngineTimeouts(connect_s=LIMIT_S, first_byte_s=LIMIT_S, gap_s=LIMIT_S)
    async with engine_proxy(engine_answers(MODEL), timeouts=timeouts) as fleet:
        fleet.engines[0].script(stream_head(), slowly)
        (call,) = calls("RW-105", Placeholders(model=MODEL))
        began = asyncio.get_running_loop().time()
        outcome = await send(fleet.client, call)
        assert asyncio.get_running_loop().time() - began > LIMIT_S
        assert outcome.content == b"".join(events)
        assert outcome.events[-1] == "[DONE]" and outcome.finish_reason == "stop"
