"""A real proxy whose clients send bodies as long as they may: what it holds of them, and for how long others wait."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from prefixcache.limits import MAX_BODY_BYTES, MAX_LARGE_BODIES_BYTES
from tests.support.engine_proxy import chat, engine_answers
from tests.support.health_watch import watched_health
from tests.support.program_fleet import START_TIMEOUT_S, get_json, running_fleet
from tests.support.scripted_engine import scripted_engine
from tests.support.waiting import eventually

MIB = 1 << 20
NUM_BODIES = 12
MOST_BYTES = 700 * MIB
"""Over what it is after its start: eight bodies in hand, and one that is taken apart."""
MOST_S = 0.5
TRIES = 3
"""A machine with other things to do delays by more than the proxy now and then: the best of so many counts."""


def _text(start: str, end: str) -> bytes:
    """With one character that makes a string of Python take four bytes for each of its characters."""
    body = (start + "🙂").encode()
    return body + b"word " * ((MAX_BODY_BYTES - len(body) - len(end)) // 5) + end.encode()


def _chat(end: str) -> bytes:
    return _text('{"model":"demo","messages":[{"role":"user","content":"', '"}]' + end)


SHAPES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "chat": ("/v1/chat/completions", lambda: _chat("}")),
    "stream": ("/v1/chat/completions", lambda: _chat(',"stream":true}')),
    "members": (
        "/v1/chat/completions",
        lambda: b'{"model":"demo","messages":[],"tools":[{' + b",".join(b'"%d":1' % n for n in range(2 * MIB)) + b"}]}",
    ),
    "prompts": ("/v1/completions", lambda: b'{"model":"demo","prompt":[' + b'"a",' * (2 * MIB) + b'"a"]}'),
}


def _memory_bytes(pid: int, name: str) -> int:
    """VmRSS or VmHWM, the most there has been of it."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@asynccontextmanager
async def _small_ones(client: httpx.AsyncClient) -> AsyncIterator[Counter[int]]:
    """Statuses of small chats that come all the while."""
    statuses: Counter[int] = Counter()
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            statuses[(await client.post("/v1/chat/completions", json=chat())).status_code] += 1

    asking = asyncio.create_task(ask())
    try:
        yield statuses
    finally:
        over.set()
        await asking


async def _attacked(url: str, pid: int, path: str, content: bytes) -> float:
    """Seconds of the slowest /health while all the bodies came at once."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        before = _memory_bytes(pid, "VmRSS")
        async with watched_health(url) as slowest_s, _small_ones(client) as statuses:
            answers = await asyncio.gather(*(client.post(path, content=content) for _ in range(NUM_BODIES)))
            health_s = await slowest_s()
        assert Counter(answer.status_code for answer in answers) == {200: NUM_BODIES}
        assert statuses.keys() == {200}
        assert _memory_bytes(pid, "VmHWM") - before < MOST_BYTES
    return health_s


@pytest.mark.alone("it measures the memory of a proxy, and for how long its loop stands")
@pytest.mark.parametrize("shape", sorted(SHAPES))
async def test_memory_is_bounded_and_small_requests_go_on(shape: str, tmp_path: Path) -> None:
    path, make = SHAPES[shape]
    content = make()
    assert len(content) <= MAX_BODY_BYTES and NUM_BODIES * MAX_BODY_BYTES > MAX_LARGE_BODIES_BYTES
    seen_s: list[float] = []
    async with scripted_engine() as engine, running_fleet(tmp_path, None) as fleet:
        engine.answer = engine_answers()
        for number in range(TRIES):
            proxy = await fleet.start_proxy(f"proxy{number}", "--engine", engine.url)
            await eventually(partial(_is_up, proxy.url), START_TIMEOUT_S)
            seen_s.append(await _attacked(proxy.url, proxy.process.pid, path, content))
            print(f"/health {seen_s[-1] * 1e3:.0f} ms")
            if seen_s[-1] < MOST_S:
                return
            await proxy.stop()
            engine.requests.clear()
        raise AssertionError(f"/health took {seen_s} s")


async def _is_up(url: str) -> bool:
    health = await get_json(url + "/health")
    return bool(health["engines"][0]["up"])
