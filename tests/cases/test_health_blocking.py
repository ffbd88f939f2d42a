"""Class health-blocking: what takes long is not done where everybody else waits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from prefixcache.limits import MAX_BODY_BYTES
from prefixcache.rendering.byte_tokenizer import byte_tokenizer_files
from prefixcache.rendering.renderer import Renderer
from tests.cases.catalogue import CASES, Placeholders
from tests.support.bare_client import Reply, ask, post_bytes
from tests.support.health_watch import watched_health
from tests.support.program_fleet import Program, all_ready, running_fleet
from tests.support.valkey import Server

MODEL = "sim"
CHAT = "/v1/chat/completions"
ALONE_S = 2.0
"""Of the streams, before the prompts come."""
MOST_S = 0.25
"""Of /health, and what streams are held up longer than without the prompts."""
TRIES = 4
"""A machine with other things to do delays by more than the proxy now and then: the best of so many counts."""
NUM_STREAMS = 4
REFUSED_BYTES = (5_000_000, 9_000_000, 17_000_000, 27_000_000)
LONG_CHARS = (30_000, 31_000, 34_000, 40_000)
"""Bytes are the tokens of this model."""
REFUSED_WITHIN_S = 5.0


@asynccontextmanager
async def _deployment(valkey: Server, folder: Path, *flags: str) -> AsyncIterator[int]:
    """The port of a proxy in front of one simulated worker; both are processes of their own."""
    async with running_fleet(folder, valkey.url) as fleet:
        worker: Program = fleet.start_worker("w0", "--num-blocks", "65536", *flags)
        proxy = await fleet.start_proxy("proxy")
        await worker.said(" ready at ")
        await all_ready(proxy, 1)
        yield int(proxy.url.rpartition(":")[2])


def _chat(text: str, **fields: object) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return post_bytes(CHAT, body)


def _longest_gap_s(reply: Reply, since: float, until: float) -> float:
    within = [at for at in reply.arrivals if since <= at <= until]
    return max((later - earlier for earlier, later in pairwise(within)), default=0.0)


@pytest.mark.alone("it measures for how long the proxy's loop stands")
async def test_rw_150_huge_prompts_hold_nobody_up(valkey: Server, tmp_path: Path) -> None:
    refused = [_chat("a" * num_bytes, max_tokens=1) for num_bytes in REFUSED_BYTES]
    assert max(map(len, refused)) < MAX_BODY_BYTES
    async with _deployment(valkey, tmp_path, "--sim-prefill-us", "2", "--max-model-len", "262144") as port:
        seen = []
        for number in range(TRIES):
            long = [
                _chat(f"{number} {place} " + "word " * (num // 5), max_tokens=1)
                for place, num in enumerate(LONG_CHARS * 4)
            ]
            seen.append(await _held_up(port, [*refused, *long]))
            print(f"/health {seen[-1][0] * 1e3:.0f} ms, streams {seen[-1][1] * 1e3:.0f} ms longer than before")
            if max(seen[-1]) <= MOST_S:
                return
        raise AssertionError(f"held up for {seen} s")


async def _held_up(port: int, prompts: list[bytes]) -> tuple[float, float]:
    """Seconds of the slowest /health, and by which the longest gap of the streams grew."""
    over = asyncio.Event()
    story = _chat("Write a very long story", max_tokens=100_000, ignore_eos=True, stream=True)
    async with watched_health(f"http://127.0.0.1:{port}") as slowest_s:
        streams = [asyncio.create_task(_until(port, story, over)) for _ in range(NUM_STREAMS)]
        began = time.monotonic()
        await asyncio.sleep(ALONE_S)  # the span that is measured
        sent_at = time.monotonic()
        replies = await asyncio.gather(*(ask(port, prompt) for prompt in prompts))
        ended = time.monotonic()
        over.set()
        answers = await asyncio.gather(*streams)
        health_s = await slowest_s()
    assert Counter(reply.status for reply in replies) == {400: len(REFUSED_BYTES), 200: 4 * len(LONG_CHARS)}
    assert all(reply.ended_at - reply.asked_at < REFUSED_WITHIN_S for reply in replies if reply.status == 400)
    usual_s = max(_longest_gap_s(answer, began, sent_at) for answer in answers)
    longest_s = max(_longest_gap_s(answer, sent_at, ended) for answer in answers)
    assert usual_s > 0, "the streams had begun"
    return health_s, longest_s - usual_s


async def _until(port: int, request: bytes, over: asyncio.Event) -> Reply:
    """What came of a stream before `over`."""
    reply = Reply(asked_at=time.monotonic())
    asking = asyncio.create_task(ask(port, request, into=reply))
    await over.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return reply


async def test_rw_151_one_tokenizer_for_all_at_once(valkey: Server, tmp_path: Path) -> None:
    attempt = CASES["RW-151"].attempt
    placeholders = Placeholders(model=MODEL)
    renderer = Renderer(byte_tokenizer_files())
    async with _deployment(valkey, tmp_path, "--sim-speed", "inf") as port:
        left = iter(range(attempt["requests"]))
        statuses: Counter[int | None] = Counter()

        async def client() -> None:
            for _ in left:
                body = placeholders.filled(attempt["request"]["body"])
                reply = await ask(port, post_bytes(CHAT, body))
                statuses[reply.status] += 1
                if reply.status == 200:
                    expected = len(renderer.encode(renderer.render(body["messages"])))
                    told = msgspec.json.decode(reply.content)["usage"]["prompt_tokens"]
                    assert told == expected

        await asyncio.gather(*(client() for _ in range(attempt["clients"])))
        assert statuses == {200: attempt["requests"]}
