"""Limits on connecting, silence and connections, none on the whole; backpressure; addresses."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from pathlib import Path

import pytest

from prefixcache.errors import EngineFault, EngineTimeout, EngineUnreachable, Unavailable
from proxy.engines.http_message import EngineRequest
from proxy.engines.http_pool import EngineTimeouts, HttpPool
from tests.support.answer_bytes import LAST_CHUNK, chunk, head, json_answer, stream_head, whole
from tests.support.certificates import self_signed
from tests.support.engine_pool import answer, ask, engine_and_pool, post
from tests.support.ports import free_port
from tests.support.response_log import ResponseLog
from tests.support.scripted_engine import close, never, scripted_engine, tell, when
from tests.support.waiting import eventually

OK = whole(b"ok")
LIMIT_S = 0.15


async def test_nobody_listens() -> None:
    pool = HttpPool(f"http://127.0.0.1:{free_port()}")
    for _ in range(3):
        with pytest.raises(EngineUnreachable, match=r"http://127.0.0.1:\d+ cannot be reached"):
            await pool.send(post(), ResponseLog())
    await pool.aclose()


async def test_a_host_name_that_cannot_be_asked_for() -> None:
    pool = HttpPool(f"http://{'a' * 64}.invalid")
    with pytest.raises(EngineUnreachable, match="cannot be reached"):
        await pool.send(post(), ResponseLog())
    await pool.aclose()


async def test_an_engine_that_does_not_accept_is_given_up() -> None:
    """Its backlog is full: the kernel drops what comes."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for filling in (first, second):
            filling.setblocking(False)
            filling.connect_ex(listening.getsockname())
        pool = HttpPool(f"http://127.0.0.1:{listening.getsockname()[1]}", timeouts=EngineTimeouts(connect_s=LIMIT_S))
        with pytest.raises(EngineUnreachable, match=r"no connection within 0.15 s"):
            await pool.send(post(), ResponseLog())
        await pool.aclose()


@pytest.mark.parametrize("begin", [b"", head(103, ("Link", "a")), stream_head()])
async def test_the_first_byte_of_a_body_is_waited_for_so_long(begin: bytes) -> None:
    """Engines write a stream's head at once and prefill then: the head alone is not what is waited for."""
    async with engine_and_pool(timeouts=EngineTimeouts(first_byte_s=LIMIT_S)) as (engine, pool):
        engine.script(begin, never())
        with pytest.raises(EngineTimeout, match="before the first byte of its answer"):
            await answer(pool)
        await eventually(lambda: not engine.connections)
        assert len(engine.requests) == 1


async def test_a_silent_engine_on_a_reused_connection_is_not_asked_twice() -> None:
    async with engine_and_pool(timeouts=EngineTimeouts(first_byte_s=LIMIT_S)) as (engine, pool):
        engine.script(OK)
        engine.script(never())
        await answer(pool)
        with pytest.raises(EngineTimeout):
            await answer(pool)
        assert len(engine.requests) == 2


async def test_a_gap_in_an_answer_is_waited_for_so_long() -> None:
    async with engine_and_pool(timeouts=EngineTimeouts(gap_s=LIMIT_S)) as (engine, pool):
        engine.script(stream_head() + chunk(b"hello"), never())
        handle, log = await ask(pool)
        with pytest.raises(EngineTimeout, match="in the middle of its answer"):
            await log.ended()
        assert handle.began and log.body == b"hello"


async def test_nothing_limits_the_whole_of_an_answer_whose_bytes_flow() -> None:
    """Several times the limit of a gap in all."""
    async with engine_and_pool(timeouts=EngineTimeouts(first_byte_s=LIMIT_S, gap_s=LIMIT_S)) as (engine, pool):

        async def trickle(connection: object) -> None:
            await asyncio.sleep(LIMIT_S / 5)

        steps = [step for _ in range(25) for step in (trickle, chunk(b"x"))]
        engine.script(stream_head(), *steps, LAST_CHUNK)
        started_at = asyncio.get_running_loop().time()
        assert (await answer(pool)).body == b"x" * 25
        assert asyncio.get_running_loop().time() - started_at > 4 * LIMIT_S


async def test_there_is_no_first_byte_limit_unless_it_is_set() -> None:
    async with engine_and_pool(timeouts=EngineTimeouts(gap_s=LIMIT_S)) as (engine, pool):
        go = asyncio.Event()
        engine.script(stream_head(), when(go), chunk(b"x") + LAST_CHUNK)
        _, log = await ask(pool)
        await asyncio.sleep(2 * LIMIT_S)
        assert not log.is_over
        go.set()
        await log.ended()


async def test_time_under_backpressure_does_not_count() -> None:
    async with engine_and_pool(timeouts=EngineTimeouts(gap_s=LIMIT_S)) as (engine, pool):
        go = asyncio.Event()
        engine.script(stream_head() + chunk(b"x"), when(go), chunk(b"y") + LAST_CHUNK)
        handle, log = await ask(pool)
        await log.has(b"x")
        handle.pause()
        await asyncio.sleep(3 * LIMIT_S)
        handle.resume()
        await asyncio.sleep(LIMIT_S / 2)
        assert not log.is_over and log.body == b"x"
        go.set()
        assert (await log.ended()).body == b"xy"


async def test_a_late_loop_is_not_a_silent_engine() -> None:
    """What came while nobody looked is read before anything is called overdue."""
    async with engine_and_pool(timeouts=EngineTimeouts(gap_s=LIMIT_S)) as (engine, pool):
        engine.script(stream_head() + chunk(b"x"), never())
        handle, log = await ask(pool)
        await log.has(b"x")
        for connection in engine.connections:
            connection.writer.write(chunk(b"y") + LAST_CHUNK)
        _block(2 * LIMIT_S)
        assert (await log.ended()).body == b"xy"
        assert handle.began


def _block(seconds: float) -> None:
    time.sleep(seconds)


# --- slots


async def test_a_request_beyond_the_connections_waits_its_turn() -> None:
    async with engine_and_pool(max_connections=2) as (engine, pool):
        go = asyncio.Event()
        engine.script(when(go), OK)
        engine.script(when(go), OK)
        engine.answer = lambda request: (whole(request.body),)
        first = [(await ask(pool))[1] for _ in range(2)]
        waiting = [asyncio.create_task(answer(pool, b"%d" % number)) for number in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.num_accepted == 2 and not any(task.done() for task in waiting)
        waiting[1].cancel()
        go.set()
        for log in first:
            await log.ended()
        assert [(await waiting[number]).body for number in (0, 2)] == [b"0", b"2"]
        assert [request.body for request in engine.requests[2:]] == [b"0", b"2"]
        assert engine.num_accepted == 2


@pytest.mark.parametrize("how", ["failed", "aborted", "ended"])
async def test_whatever_ends_an_answer_frees_its_slot(how: str) -> None:
    async with engine_and_pool(max_connections=1) as (engine, pool):
        for _ in range(3):
            arrived = asyncio.Event()
            engine.script(tell(arrived), *((close(),) if how == "failed" else (OK,) if how == "ended" else (never(),)))
            handle, log = await ask(pool)
            await arrived.wait()
            if how == "aborted":
                handle.abort()
                handle.abort()
            else:
                await log.settled()
                handle.abort()
        engine.script(OK)
        await answer(pool)


async def test_an_abort_closes_the_connection_and_nothing_more_is_heard() -> None:
    async with engine_and_pool() as (engine, pool):
        go = asyncio.Event()
        engine.script(stream_head() + chunk(b"x"), when(go), chunk(b"y") + LAST_CHUNK)
        engine.script(OK)
        handle, log = await ask(pool)
        await log.has(b"x")
        handle.abort()
        go.set()
        await eventually(lambda: not engine.connections and pool.num_connections == 0)
        assert log.body == b"x" and not log.is_over and handle.began
        handle.pause()
        handle.resume()
        await answer(pool)
        assert engine.requests[-1].connection == 1


async def test_a_paused_answer_leaves_its_bytes_with_the_engine() -> None:
    piece = b"x" * (1 << 20)
    async with engine_and_pool() as (engine, pool):
        engine.script(stream_head(), *[chunk(piece)] * 64, LAST_CHUNK)
        handle, log = await ask(pool)
        await eventually(lambda: log.data)
        handle.pause()
        taken = 0
        while taken != (taken := len(log.body)):
            for _ in range(50):
                await asyncio.sleep(0)
        assert taken < 32 << 20
        handle.resume()
        assert len((await log.ended()).body) == 64 << 20


async def test_a_large_request_arrives_whole() -> None:
    body = bytes(range(256)) * (1 << 16)
    async with engine_and_pool() as (engine, pool):
        engine.script(OK)
        await answer(pool, body)
        assert engine.requests[0].body == body


# --- fetch


async def test_fetch_beside_full_slots() -> None:
    async with engine_and_pool(max_connections=1) as (engine, pool):
        engine.script(never())
        handle, _ = await ask(pool)
        await eventually(lambda: len(engine.requests) == 1)
        for _ in range(2):
            engine.script(json_answer({"data": []}, ("X-A", "b")))
            got = await pool.fetch("GET", "/v1/models", headers=[(b"a", b"b")], timeout_s=5, most_bytes=100)
            assert (got.status, got.body) == (200, b'{"data": []}') and (b"X-A", b"b") in got.headers
        assert [request.connection for request in engine.requests] == [0, 1, 1]
        assert engine.requests[-1].header("a") == "b" and engine.requests[-1].header("content-length") is None
        waiting = asyncio.create_task(answer(pool))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(engine.requests) == 3  # A fetch frees no slot that it did not take.
        engine.script(OK)
        handle.abort()
        await waiting


async def test_fetch_is_limited_in_time_and_size() -> None:
    async with engine_and_pool() as (engine, pool):
        engine.script(stream_head() + chunk(b"x"), never())
        with pytest.raises(EngineTimeout, match=r"did not answer /a within 0.1 s"):
            await pool.fetch("GET", "/a", timeout_s=0.1, most_bytes=100)
        engine.script(whole(b"x" * 101))
        with pytest.raises(EngineFault, match="more than 100 bytes"):
            await pool.fetch("GET", "/a", timeout_s=5, most_bytes=100)
        engine.script(whole(b"x" * 100))
        assert len((await pool.fetch("GET", "/a", timeout_s=5, most_bytes=100)).body) == 100
        engine.script(head(200, ("Content-Length", "1000")))
        assert (await pool.fetch("HEAD", "/a", timeout_s=5, most_bytes=100)).body == b""
        await eventually(lambda: not engine.connections)


# --- closing


async def test_closing_ends_everything() -> None:
    async with scripted_engine() as engine:
        pool = HttpPool(engine.url, max_connections=3)
        engine.script(OK)
        engine.script(never())
        engine.script(stream_head() + chunk(b"x"), never())
        engine.script(never())
        await answer(pool)
        logs = [(await ask(pool))[1] for _ in range(3)]  # The first of them on a connection used before.
        await logs[1].has(b"x")
        waiting = asyncio.create_task(answer(pool))
        await asyncio.sleep(0)
        await pool.aclose()
        assert pool.num_connections == 0
        for log in logs:
            assert isinstance(log.error, Unavailable) and "closing" in str(log.error)
        with pytest.raises(EngineUnreachable, match="closing"):
            await waiting
        with pytest.raises(EngineUnreachable, match="closing"):
            await answer(pool)
        await pool.aclose()
        assert len(engine.requests) == 4


# --- addresses


async def test_ipv6_and_a_base_path() -> None:
    async with scripted_engine("::1") as engine:
        pool = HttpPool(engine.url + "/team/a/")
        assert pool.url == engine.url + "/team/a"
        engine.script(OK)
        await answer(pool)
        assert engine.requests[0].target == "/team/a/v1/chat/completions"
        assert engine.requests[0].header("host") == f"[::1]:{engine.port}"
        await pool.aclose()


async def test_tls_is_checked(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate, key)
    async with scripted_engine(tls=serving) as engine:
        assert engine.url.startswith("https://")
        pool = HttpPool(engine.url)
        with pytest.raises(EngineUnreachable, match="certificate verify failed"):
            await answer(pool)
        await pool.aclose()
        pool = HttpPool(engine.url, tls=ssl.create_default_context(cafile=certificate))
        engine.script(stream_head() + chunk(b"a" * 100_000) + LAST_CHUNK)
        engine.script(OK)
        engine.script(close())
        engine.script(OK)
        assert len((await answer(pool)).body) == 100_000
        await answer(pool)
        await answer(pool)
        assert [request.connection for request in engine.requests] == [0, 0, 0, 1]
        await pool.aclose()
        assert pool.num_connections == 0


async def test_an_engine_that_speaks_no_tls() -> None:
    async with scripted_engine() as engine:
        pool = HttpPool(engine.url.replace("http", "https"), timeouts=EngineTimeouts(connect_s=LIMIT_S))
        with pytest.raises(EngineUnreachable):
            await pool.send(EngineRequest(method="GET", target="/"), ResponseLog())
        await pool.aclose()
