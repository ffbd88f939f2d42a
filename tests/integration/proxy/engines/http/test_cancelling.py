"""Callers that leave at any moment leave nothing behind: no socket, no task, no slot."""

from __future__ import annotations

import asyncio
import gc
import ssl
from pathlib import Path
from typing import Any

import pytest

from prefixcache.errors import EngineFault, EngineUnreachable
from proxy.engines.http_pool import HttpPool
from tests.support.answer_bytes import chat_stream, chunk, stream_head, whole
from tests.support.certificates import self_signed
from tests.support.engine_pool import answer, ask, engine_and_pool, num_sockets, post
from tests.support.response_log import ResponseLog
from tests.support.scripted_engine import ScriptedEngine, Step, close, never, reset, scripted_engine, when
from tests.support.seeds import seeded
from tests.support.waiting import eventually

OK = whole(b"ok")
MOST_TURNS = 40
"""Of the loop: more than a request and its answer take."""


async def _cancelled_after(num_turns: int, pool: HttpPool) -> bool:
    """A caller as a handler is one; whether the cancellation met it before its end."""
    task = asyncio.create_task(answer(pool))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    is_cancelled = task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return is_cancelled
    return False


async def _works(engine: ScriptedEngine, pool: HttpPool, num_slots: int) -> None:
    """All slots are free: so many requests are in hand at once."""
    go = asyncio.Event()
    before = len(engine.requests)
    engine.answer = lambda request: (when(go), OK)
    logs = [(await ask(pool))[1] for _ in range(num_slots)]
    await eventually(lambda: len(engine.requests) == before + num_slots)
    go.set()
    for log in logs:
        await log.ended()


@pytest.mark.parametrize("state", ["fresh", "idle", "stale", "full"])
async def test_cancelled_at_every_turn(state: str) -> None:
    num_met = 0
    before = num_sockets()
    for num_turns in range(MOST_TURNS):
        async with engine_and_pool(max_connections=1) as (engine, pool):
            engine.answer = lambda request: (OK,)
            if state in ("idle", "stale"):
                await answer(pool)
            if state == "stale":
                engine.close_idle()
            blocking = None
            if state == "full":
                engine.script(never())
                blocking, _ = await ask(pool)
            num_met += await _cancelled_after(num_turns, pool)
            if blocking is not None:
                blocking.abort()
            await _works(engine, pool, 1)
            assert pool.num_connections == 1
        await eventually(lambda: num_sockets() == before)
    assert num_met > 2


async def test_a_fetch_cancelled_at_every_turn() -> None:
    num_met = 0
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
    async with engine_and_pool(max_connections=1) as (engine, pool):
        engine.answer = lambda request: (close(),) if len(engine.requests) % 2 else (OK,)
        for num_turns in range(2 * MOST_TURNS):
            task = asyncio.create_task(pool.fetch("GET", "/v1/models", timeout_s=5, most_bytes=10))
            for _ in range(num_turns // 2):
                await asyncio.sleep(0)
            num_met += task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: len(engine.connections) == pool.num_connections == pool.num_idle)
        await _works(engine, pool, 1)
    gc.collect()
    assert num_met > 2 and unseen == []


async def test_cancelled_in_the_middle_of_a_tls_handshake(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)
    before = num_sockets()
    num_met = 0
    async with scripted_engine(tls=serving) as engine:
        engine.answer = lambda request: (OK,)
        for num_turns in range(MOST_TURNS):
            pool = HttpPool(engine.url, max_connections=1, tls=trusting)
            num_met += await _cancelled_after(num_turns, pool)
            await answer(pool)
            await pool.aclose()
    assert num_met > 5
    await eventually(lambda: num_sockets() == before)


async def test_closing_at_every_turn() -> None:
    """Whoever waits for a slot, connects or sends again is told, and nothing stays open."""
    before = num_sockets()
    for num_turns in range(MOST_TURNS):
        async with engine_and_pool(max_connections=2) as (engine, pool):
            engine.answer = lambda request: (OK,)
            await answer(pool)
            engine.close_idle()
            tasks = [asyncio.create_task(answer(pool)) for _ in range(4)]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await pool.aclose()
            async with asyncio.timeout(5):
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                assert isinstance(result, ResponseLog) or "closing" in str(result)
    await eventually(lambda: num_sockets() == before)


async def test_a_storm() -> None:
    """Callers that leave, abort and pause at random, an engine that answers, breaks and resets at random."""
    random = seeded("storm")
    num_slots = 8
    before = num_sockets()
    texts = chat_stream(["some", " text"] * 10)
    async with engine_and_pool(max_connections=num_slots) as (engine, pool):
        most_connections = 0

        def reply(request: object) -> tuple[Step, ...]:
            cut = random.randrange(len(texts))
            return random.choice(
                (
                    (OK,),
                    (texts,),
                    (texts[:cut], texts[cut:]),
                    (texts[:cut], close()),
                    (texts[:cut], reset()),
                    (texts, close()),
                    (close(),),
                    (stream_head() + chunk(b"x"), never()),
                )
            )

        engine.answer = reply

        async def caller() -> None:
            nonlocal most_connections
            log = ResponseLog()
            handle = await pool.send(post(), log)
            most_connections = max(most_connections, pool.num_connections)
            try:
                for _ in range(random.randrange(30)):
                    await asyncio.sleep(0)
                    random.choice((handle.pause, handle.resume, handle.resume))()
                handle.resume()
                if random.random() < 0.3:
                    handle.abort()
                    handle.pause()
                else:
                    async with asyncio.timeout(0.05):
                        await log.ended()
            except (EngineFault, TimeoutError):
                pass
            finally:
                handle.abort()

        for _ in range(40):
            tasks = [asyncio.create_task(caller()) for _ in range(25)]
            for task in random.sample(tasks, 8):
                for _ in range(random.randrange(4)):
                    await asyncio.sleep(0)
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert result is None or isinstance(result, asyncio.CancelledError | EngineUnreachable), result
        assert 1 < most_connections <= num_slots
        await _works(engine, pool, num_slots)
        assert pool.num_connections <= num_slots
    await eventually(lambda: num_sockets() == before)
