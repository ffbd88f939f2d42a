"""Which connection a request takes, and what happens when the engine has closed it already."""

from __future__ import annotations

import asyncio

import pytest

from prefixcache.errors import EngineFault, EngineUnreachable
from proxy.engines.http_pool import EngineTimeouts
from tests.support.answer_bytes import chat_events, chat_stream, head, json_answer, usage, whole
from tests.support.engine_pool import answer, ask, engine_and_pool, post
from tests.support.response_log import ResponseLog
from tests.support.scripted_engine import ScriptedEngine, Step, close, reset, tell, when
from tests.support.seeds import seeded
from tests.support.waiting import eventually

OK = whole(b"ok")


def _connections(engine: ScriptedEngine) -> list[int]:
    return [request.connection for request in engine.requests]


async def test_a_stream_and_then_a_whole_answer_on_one_connection() -> None:
    async with engine_and_pool() as (engine, pool):
        engine.script(chat_stream(["Hi", " there"], usage=usage(10, 2, 0)))
        engine.script(json_answer({"a": 1}))
        handle, first = await ask(pool, b'{"stream":true}')
        await first.ended()
        assert handle.began
        assert first.body == b"".join(chat_events(["Hi", " there"], usage=usage(10, 2, 0)))
        assert (await answer(pool)).body == b'{"a": 1}'
        assert _connections(engine) == [0, 0]
        request = engine.requests[0]
        assert (request.method, request.target, request.body) == ("POST", "/v1/chat/completions", b'{"stream":true}')
        assert request.header("content-length") == "15"
        assert request.header("host") == engine.url.removeprefix("http://")


async def test_the_newest_idle_connection_is_taken() -> None:
    async with engine_and_pool() as (engine, pool):
        may_end = [asyncio.Event() for _ in range(3)]
        for event in may_end:
            engine.script(when(event), OK)
        logs = []
        for _ in may_end:
            logs.append((await ask(pool))[1])
            await eventually(lambda: len(engine.requests) == len(logs))
        for number in (1, 2, 0):
            may_end[number].set()
            await logs[number].ended()
        assert pool.num_idle == 3
        engine.answer = lambda request: (OK,)
        for _ in range(3):
            await answer(pool)
        assert _connections(engine) == [0, 1, 2, 0, 0, 0]


async def test_an_idle_connection_is_closed_before_the_engine_would() -> None:
    async with engine_and_pool(timeouts=EngineTimeouts(keep_alive_s=0.05)) as (engine, pool):
        engine.answer = lambda request: (OK,)
        await answer(pool)
        assert pool.num_idle == 1
        await eventually(lambda: not engine.connections and pool.num_connections == 0)
        await answer(pool)
        assert _connections(engine) == [0, 1]


@pytest.mark.parametrize(
    ("headers", "is_reused"),
    [
        ([("Connection", "close")], False),
        ([("connection", "Keep-Alive"), ("Keep-Alive", "timeout=30")], True),
        ([("Keep-Alive", "timeout=0")], False),
    ],
)
async def test_what_the_engine_says_of_keep_alive_is_honoured(headers: list[tuple[str, str]], is_reused: bool) -> None:
    async with engine_and_pool() as (engine, pool):
        engine.answer = lambda request: (whole(b"ok", *headers),)
        await answer(pool)
        await answer(pool)
        assert _connections(engine) == ([0, 0] if is_reused else [0, 1])


async def test_until_close_and_then_a_fresh_one() -> None:
    async with engine_and_pool() as (engine, pool):
        engine.script(head(200) + b"hello", close())
        engine.script(OK)
        assert (await answer(pool)).body == b"hello"
        assert (await answer(pool)).body == b"ok"
        assert _connections(engine) == [0, 1]


async def test_a_connection_that_the_engine_closed_while_idle_is_forgotten() -> None:
    async with engine_and_pool() as (engine, pool):
        engine.answer = lambda request: (OK,)
        await answer(pool)
        engine.close_idle()
        await eventually(lambda: pool.num_connections == 0)
        await answer(pool)
        assert _connections(engine) == [0, 1]


# --- a stale connection


@pytest.mark.parametrize("end", [close(), reset()])
async def test_a_request_that_meets_a_closing_connection_is_sent_once_more(end: Step) -> None:
    async with engine_and_pool() as (engine, pool):
        engine.script(OK)
        engine.script(end)
        engine.script(OK)
        await answer(pool, b"first")
        handle, log = await ask(pool, b"second")
        assert not handle.began
        assert (await log.ended()).body == b"ok"
        assert [request.body for request in engine.requests] == [b"first", b"second", b"second"]
        assert _connections(engine) == [0, 0, 1]


async def test_a_connection_closed_without_being_read_is_met_too() -> None:
    """FIN is on its way when the request is written, as with a server whose keep-alive time ran out."""
    async with engine_and_pool() as (engine, pool):
        engine.answer = lambda request: (OK,)
        await answer(pool)
        engine.close_idle()  # The pool has no turn of the loop to see it.
        await answer(pool)
        assert len(engine.requests) == 2 and engine.num_accepted == 2


async def test_older_idle_connections_are_not_tried_after_a_stale_one() -> None:
    async with engine_and_pool() as (engine, pool):
        go = asyncio.Event()
        for _ in range(3):
            engine.script(when(go), OK)
        logs = [(await ask(pool))[1] for _ in range(3)]
        go.set()
        for log in logs:
            await log.ended()
        engine.script(close())
        engine.script(OK)
        await answer(pool)
        assert _connections(engine)[-1] == 3
        await eventually(lambda: pool.num_connections == pool.num_idle == 1)


async def test_never_more_than_once() -> None:
    async with engine_and_pool() as (engine, pool):
        engine.script(OK)
        engine.script(close())
        engine.script(close())
        await answer(pool)
        with pytest.raises(EngineFault, match="closed the connection before it answered"):
            await answer(pool)
        assert _connections(engine) == [0, 0, 1] and engine.num_scripts_left == 0


@pytest.mark.parametrize("end", [close(), reset()])
async def test_never_from_a_fresh_connection(end: Step) -> None:
    async with engine_and_pool() as (engine, pool):
        engine.script(end)
        with pytest.raises(EngineFault, match="before it answered"):
            await answer(pool)
        assert len(engine.requests) == 1


@pytest.mark.parametrize("begin", [b"H", head(100), head(200, ("Content-Length", "5")) + b"hel"])
async def test_never_after_a_byte(begin: bytes) -> None:
    async with engine_and_pool() as (engine, pool):
        engine.script(OK)
        engine.script(begin, close())
        await answer(pool)
        handle, log = await ask(pool)
        with pytest.raises(EngineFault, match="in the middle of its answer"):
            await log.ended()
        assert handle.began and len(engine.requests) == 2


async def test_an_engine_that_is_gone_cannot_be_sent_to_again() -> None:
    async with engine_and_pool() as (engine, pool):
        engine.script(OK)

        async def stop(connection: object) -> None:
            engine.stop_listening()

        engine.script(stop, close())
        await answer(pool)
        with pytest.raises(EngineUnreachable, match="cannot be reached"):
            await answer(pool)


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_backpressure_and_abort_hold_while_a_request_is_sent_again(is_aborted: bool) -> None:
    async with engine_and_pool() as (engine, pool):
        arrived = asyncio.Event()
        engine.script(OK)
        engine.script(close())
        engine.script(tell(arrived), OK)
        await answer(pool)
        handle, log = await ask(pool)
        for _ in range(1_000):  # Until the stale one is gone: the fresh one is being opened then.
            if pool.num_connections == 0:
                break
            await asyncio.sleep(0)
        if is_aborted:
            handle.abort()
            await eventually(lambda: not engine.connections)
            assert not arrived.is_set() and not log.is_over
        else:
            handle.pause()
            await arrived.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert log.status is None
            handle.resume()
            await log.ended()


async def test_a_thousand_requests_over_connections_that_close_at_random() -> None:
    """After any answer, by FIN or RST, at once or when the next request is there: no client sees it."""
    random = seeded("keep-alive races")
    async with engine_and_pool(max_connections=16) as (engine, pool):
        num_stale = 0
        served: dict[int, int] = {}

        def reply(request: object) -> tuple[Step, ...]:
            nonlocal num_stale
            number = engine.requests[-1].connection
            served[number] = served.get(number, 0) + 1
            kind = random.random()
            if served[number] > 1 and kind < 0.2:
                num_stale += 1
                return (random.choice((close(), reset())),)
            answered = whole(b"echo " + engine.requests[-1].body)
            return (answered, close()) if kind > 0.8 else (answered,)

        engine.answer = reply

        async def client(name: int) -> None:
            for number in range(125):
                body = b"%d/%d" % (name, number)
                assert (await answer(pool, body)).body == b"echo " + body

        await asyncio.gather(*(client(name) for name in range(8)))
        assert num_stale > 20
        assert len(engine.requests) >= 1_000 + num_stale


async def test_a_request_that_is_none_takes_no_slot() -> None:
    async with engine_and_pool(max_connections=1) as (engine, pool):
        for _ in range(3):
            with pytest.raises(Exception, match="cannot be sent to an engine"):
                await pool.send(post(target="no path"), ResponseLog())
        engine.script(OK)
        await answer(pool)
