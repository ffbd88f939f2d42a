"""A request that is cancelled at any of its awaits leaves nothing behind, in whatever phase it is by then."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

import proxy.app
from prefixcache.metrics import ProxyMetrics
from proxy.access_log import access_middleware
from proxy.app import GENERATION, HELD
from tests.cases.world import MODEL, World, open_world
from tests.support.answer_bytes import chat_answer, chat_events, chunk, stream_head
from tests.support.bare_client import Leave, ask, post_bytes
from tests.support.engine_proxy import chat as engine_chat
from tests.support.engine_proxy import engine_answers, engine_proxy
from tests.support.raw_http import raw_connection
from tests.support.scripted_engine import ReceivedRequest, ScriptedConnection, Step
from tests.support.seeds import seeded
from tests.support.suspensions import Suspensions
from tests.support.traces import Traces, traces
from tests.support.valkey import Server
from tests.support.waiting import eventually

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MOST_AWAITS = 60
QUIET_S = 5.0
BURST = 1_000
BURST_S = 3.0
"""One loop serves them all, clients and proxy and workers: what comes faster is gone before it is read."""
STILL = 6
"""Looks in a row that see the same."""


class Cancelling:
    """Stands around the handler of the next POST."""

    def __init__(self) -> None:
        self.next: Suspensions | None = None

    def around(self, original: Callable[[ProxyMetrics], Middleware]) -> Callable[[ProxyMetrics], Middleware]:
        def with_suspensions(metrics: ProxyMetrics) -> Middleware:
            inner = original(metrics)

            @web.middleware
            async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
                suspensions, self.next = (self.next, None) if request.method == "POST" else (None, self.next)
                answering = inner(request, handler)
                return await (answering if suspensions is None else suspensions.of(_coroutine(answering)))

            return middleware

        return with_suspensions


async def _coroutine(work: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    return await work


@pytest.fixture
def cancelling(monkeypatch: pytest.MonkeyPatch) -> Cancelling:
    made = Cancelling()
    monkeypatch.setattr(proxy.app, "access_middleware", made.around(access_middleware))
    return made


@asynccontextmanager
async def quiet_world(valkey: Server, **how: Any) -> AsyncIterator[tuple[World, Callable[..., Awaitable[None]]]]:
    """Two workers that have answered, and what waits until all is as it was then."""
    async with open_world(valkey, num_workers=2, **how) as world:
        for _ in range(4):
            assert (await ask(world.proxy.port, _request("long, whole", world))).status == 200
        now = partial(traces, world.proxy, world.workers, valkey)
        at_first = await _still(now)
        yield world, partial(_nothing_left, now, at_first)


async def _still(now: Callable[[], Traces]) -> Traces:
    """What is there once nothing changes any more."""
    seen = [now()]

    def is_still() -> bool:
        seen.append(now())
        return len(seen) > STILL and all(each == seen[-1] for each in seen[-STILL:]) and not seen[-1].num_pending

    await eventually(is_still, QUIET_S)
    return seen[-1]


async def _nothing_left(now: Callable[[], Traces], at_first: Traces, after: Suspensions | None = None) -> None:
    with contextlib.suppress(AssertionError):
        await eventually(lambda: not now().left_since(at_first), QUIET_S)
    left = now().left_since(at_first)
    assert not left, (after.places[-1:] if after is not None else "", left)


_unique = itertools.count()


def _request(kind: str, world: World, **fields: Any) -> bytes:
    """Every prompt is a new one, so that all of it is to be computed and claimed."""
    text = world.placeholders.text(900 if "long" in kind else 40, seed=f"{kind} {next(_unique)}")
    stream = "stream" in kind
    if "prompts" in kind:
        body = {"prompt": [f"{text} {place}" for place in range(3)], "n": 2}
        return post_bytes(COMPLETION, {"model": MODEL, "max_tokens": 6, "stream": stream, **body, **fields})
    messages = [{"role": "user", "content": text}]
    return post_bytes(CHAT, {"model": MODEL, "messages": messages, "max_tokens": 6, "stream": stream, **fields})


@pytest.mark.parametrize("kind", ["short, stream", "long, stream", "long, whole", "prompts, stream", "prompts, whole"])
async def test_at_each_await_in_turn(valkey: Server, cancelling: Cancelling, kind: str) -> None:
    async with quiet_world(valkey, step_delay_s=0.02) as (world, nothing_left):
        places: list[str] = []
        for number in range(1, MOST_AWAITS):
            suspensions = cancelling.next = Suspensions(cancel_at=number)
            reply = await ask(world.proxy.port, _request(kind, world), timeout_s=10.0)
            assert reply.end in ("unanswered", "cut", "complete"), reply
            await nothing_left(suspensions)
            if not suspensions.was_cancelled:
                break
            places.append(suspensions.places[-1])
        print(f"{kind}: cancelled at {len(places)} awaits:", *places, sep="\n  ")
        assert reply.status == 200 and reply.end == "complete"
        assert len(places) >= 2
        assert (await ask(world.proxy.port, _request(kind, world))).status == 200


# --- by phase: a client that leaves --------------------------------------------------------------------------


@asynccontextmanager
async def _in_queue(world: World) -> AsyncIterator[Callable[[], bool]]:
    """Every worker is in the middle of a step for somebody else, so that what comes then waits."""
    for worker in world.workers:
        worker.runner.pause()
    others = [asyncio.create_task(ask(world.proxy.port, _request("long, whole", world))) for _ in world.workers * 2]
    await eventually(lambda: sum(worker.engine.load.waiting for worker in world.workers) >= len(others) - 2)
    await eventually(lambda: all(worker.runner._is_held.is_set() for worker in world.workers))
    num_waiting = sum(worker.engine.load.waiting for worker in world.workers)
    yield lambda: sum(worker.engine.load.waiting for worker in world.workers) > num_waiting
    for worker in world.workers:
        worker.runner.resume()
    assert {reply.status for reply in await asyncio.gather(*others)} == {200}


@asynccontextmanager
async def _in_prefill(world: World) -> AsyncIterator[Callable[[], bool]]:
    for worker in world.workers:
        worker.runner.pause()
    yield lambda: any(worker.runner._is_held.is_set() for worker in world.workers)
    for worker in world.workers:
        worker.runner.resume()


@asynccontextmanager
async def _in_decode(world: World) -> AsyncIterator[Callable[[], bool]]:
    num_gaps = _num_gaps(world)
    yield lambda: _num_gaps(world) >= num_gaps + 3


@asynccontextmanager
async def _held(world: World) -> AsyncIterator[Callable[[], bool]]:
    """No worker takes anything."""
    streams = [link.stream for link in world.proxy.fleet.links if link.stream is not None]
    for stream in streams:
        stream.is_draining = True
    yield lambda: world.proxy.app[HELD].num_held == 1
    for stream in streams:
        stream.is_draining = False


@asynccontextmanager
async def _between_workers(world: World) -> AsyncIterator[Callable[[], bool]]:
    """Its worker is lost in the middle of the answer, and nobody goes on with it yet."""
    num_gaps, placer = _num_gaps(world), world.proxy.app[GENERATION]._placer
    is_cut = False

    def is_between() -> bool:
        nonlocal is_cut
        if not is_cut and _num_gaps(world) >= num_gaps + 3:
            is_cut = True
            for link in world.proxy.fleet.links:
                if link.stream is not None and link.stream.num_running:
                    link.stream.cut("was cut by the test")
        return world.proxy.app[HELD].num_held == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placer, "takers", lambda *_: [])
        yield is_between
    await world.proxy.ready(len(world.workers))
    for link in world.proxy.fleet.links:
        link.breaker.answered()  # what was cut counts as a fault, and whoever left cannot tell that it works again


def _num_gaps(world: World) -> float:
    return world.proxy.metric("prefixcache_inter_token_latency_seconds_count")


Phase = Callable[[World], AbstractAsyncContextManager[Callable[[], bool]]]


@pytest.mark.parametrize("phase", [_in_queue, _in_prefill, _in_decode, _held, _between_workers])
async def test_a_client_that_leaves_in_each_phase(valkey: Server, phase: Phase) -> None:
    async with quiet_world(valkey, step_delay_s=0.005) as (world, nothing_left):
        ways = [*itertools.product(("long, stream", "long, whole"), ("fin", "rst"))]
        for num_before, (kind, how) in enumerate(ways):
            async with phase(world) as is_there, raw_connection(world.proxy.port) as connection:
                connection.send(_request(kind, world, max_tokens=900, ignore_eos=True))
                await eventually(is_there)
                assert _num_left(world) == num_before
                if how == "rst":
                    connection.reset()
                else:
                    connection.writer.transport.abort()
                await eventually(partial(_have_left, world, num_before + 1))
                await eventually(lambda: world.proxy.app[HELD].num_held == 0)
            await nothing_left()
        assert world.proxy.metric("prefixcache_requests_total", code="500") == 0


def _num_left(world: World) -> float:
    """Requests whose client left."""
    return world.proxy.metric("prefixcache_requests_total", code="499")


def _have_left(world: World, number: int) -> bool:
    return _num_left(world) == number


async def test_a_burst_of_a_thousand_that_leave(valkey: Server) -> None:
    random = seeded("clients that leave")
    async with quiet_world(valkey, step_delay_s=0.005) as (world, nothing_left):

        async def one() -> str:
            leave = Leave(after_s=random.uniform(0.0, 1.0), how=random.choice(["fin", "rst"]))
            kind = random.choice(["short, stream", "short, whole", "long, stream", "prompts, whole"])
            request = _request(kind, world, max_tokens=900, ignore_eos=True)
            await asyncio.sleep(random.uniform(0.0, BURST_S))
            return (await ask(world.proxy.port, request, leave=leave)).end

        ends = Counter(await asyncio.gather(*(one() for _ in range(BURST))))
        print(dict(ends), f"{_num_left(world)} were seen")
        assert ends["left"] == BURST and _num_left(world) > 0.5 * BURST
        await nothing_left()
        assert (await ask(world.proxy.port, _request("long, whole", world))).status == 200
        await nothing_left()


# --- a plain engine ------------------------------------------------------------------------------------------


async def _a_while(_connection: ScriptedConnection) -> None:
    await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
async def test_at_each_await_in_front_of_an_engine(cancelling: Cancelling, stream: bool) -> None:
    def answer(_request: ReceivedRequest) -> Sequence[Step]:
        if not stream:
            return (_a_while, chat_answer("hi"))
        steps: list[Step] = [_a_while, stream_head()]
        for each in (*chat_events(["hi", " you"]), b""):
            steps += [_a_while, chunk(each)]
        return steps

    async with engine_proxy(engine_answers(then=answer)) as world:
        request = post_bytes(CHAT, engine_chat("word " * 2_000, stream=stream))
        for _ in range(3):
            assert (await ask(world.proxy.port, request)).status == 200
        at_first = await _still(lambda: traces(world.proxy))
        places: list[str] = []
        for number in range(1, MOST_AWAITS):
            suspensions = cancelling.next = Suspensions(cancel_at=number)
            reply = await ask(world.proxy.port, request, timeout_s=10.0)
            await _nothing_left(lambda: traces(world.proxy), at_first, suspensions)
            if not suspensions.was_cancelled:
                break
            places.append(suspensions.places[-1])
        print(f"cancelled at {len(places)} awaits:", *places, sep="\n  ")
        assert reply.end == "complete" and places
