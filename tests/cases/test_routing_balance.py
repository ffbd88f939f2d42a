"""Class routing-balance: a prefix that everybody shares must not make one worker work while the others wait."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import aiohttp
import pytest

from prefixcache.cli.children import end, spawn
from tests.cases.catalogue import Call, Placeholders, calls, changed
from tests.support.ports import free_port
from tests.support.program_fleet import Program, all_ready, get_json, running_fleet
from tests.support.valkey import Server
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
NUM_WORKERS = 4
POLICIES = ("eta", "round_robin")
ROUNDS = 4
"""Bursts of each policy, in turns, every one with another system prompt: nobody holds it when the burst begins."""
MARGIN = 1.25
"""p95 of the one over p95 of the other. Round robin spreads such a burst as well as can be; over single bursts the
ratio moves by 5 % on a quiet machine. Exact longest prefix has 1.8, and three times the fair share on one worker."""
MOST_UNFAIR_S = 0.2
"""A burst takes 1.5 s. That one has a queue and another nothing to do cannot be mended before the proxy knows it."""

pytestmark = pytest.mark.alone("two policies are compared by their times to the first token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request, as its client saw it."""

    worker: str
    sent_at: float
    first_at: float
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.sent_at


async def test_rw_040_one_system_prompt_for_all(valkey: Server, tmp_path: Path) -> None:
    async with running_fleet(tmp_path, valkey.url) as fleet:
        workers = [fleet.start_worker(f"worker-{number}", niceness=5) for number in range(NUM_WORKERS)]
        for worker in workers:
            await worker.said(" ready at ")
        proxies = [await fleet.start_proxy(policy, "--policy", policy) for policy in POLICIES]
        for proxy in proxies:
            await all_ready(proxy, NUM_WORKERS)
        await _compare(proxies, "sim")


async def test_rw_040_one_system_prompt_for_all_on_plain_engines(valkey: Server, tmp_path: Path) -> None:
    ports = [free_port() for _ in range(NUM_WORKERS)]
    command = [sys.executable, "-m", "tests.support.lru_engine", *(f"--port={port}" for port in ports)]
    log = tmp_path / "engines.log"
    with log.open("wb") as written:
        engines = spawn([*command, "--capacity-blocks=4000"], stdout=written, stderr=written, cwd=ROOT)
    try:
        await eventually(lambda: log.read_text().startswith("ready"), 30.0)
        async with running_fleet(tmp_path, valkey.url) as fleet:
            flags = [f"--engine=http://127.0.0.1:{port}" for port in ports]
            proxies = [await fleet.start_proxy(policy, "--policy", policy, *flags) for policy in POLICIES]
            for proxy in proxies:
                await eventually(partial(_all_up, proxy), 30.0)
            await _compare(proxies, "lru")
    finally:
        await asyncio.to_thread(end, engines, patience_s=2.0)


async def _all_up(proxy: Program) -> bool:
    engines = (await get_json(proxy.url + "/health"))["engines"]
    return len(engines) == NUM_WORKERS and all(engine["up"] for engine in engines)


async def _compare(proxies: Sequence[Program], model: str) -> None:
    """Bursts through one proxy and the other, and all that the case expects of the first one."""
    placeholders = Placeholders(model=model)
    p95_s: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for number in range(ROUNDS):
        for policy, proxy in zip(POLICIES, proxies, strict=True):
            system = placeholders.text(512, seed=f"{policy} {number}")
            seen = await _burst(proxy.url, [_about(call, system) for call in calls("RW-040", placeholders)])
            p95_s[policy].append(sorted(one.ttft_s for one in seen)[int(0.95 * len(seen))])
            if policy == POLICIES[0]:
                _check_balance(seen)
    ratio = median(p95_s[POLICIES[0]]) / median(p95_s[POLICIES[1]])
    assert ratio <= MARGIN, p95_s


def _about(call: Call, system: str) -> Call:
    """The same question under another system prompt; streamed, for the time to the first token to show."""
    _, user = call.body["messages"]
    return changed(
        call,
        messages=[{"role": "system", "content": system}, user],
        stream=True,
        stream_options={"include_usage": True},
    )


def _check_balance(seen: Sequence[Seen]) -> None:
    requests = Counter(one.worker for one in seen)
    fair = len(seen) / NUM_WORKERS
    assert len(requests) == NUM_WORKERS and max(requests.values()) <= 2 * fair, requests
    cold = [one for one in seen if one.cached_tokens == 0]
    assert len(cold) <= NUM_WORKERS + 1, "where the prefix has spread to it is found"
    assert _unfair_s(seen) <= MOST_UNFAIR_S, requests


def _unfair_s(seen: Sequence[Seen]) -> float:
    """How long, once all are sent, some worker had more than twice its share of what waited for a first token while
    another one had nothing to prefill."""
    all_sent_at = max(one.sent_at for one in seen)
    moments = sorted({all_sent_at, *(one.first_at for one in seen if one.first_at > all_sent_at)})
    unfair_s = 0.0
    for begin, end_ in pairwise(moments):
        waiting = Counter(one.worker for one in seen if one.first_at > begin)
        share = -(-waiting.total() // NUM_WORKERS)
        if len(waiting) < NUM_WORKERS and max(waiting.values()) > 2 * share:
            unfair_s += end_ - begin
    return unfair_s


async def _burst(url: str, asked: Sequence[Call]) -> list[Seen]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        return await asyncio.gather(*(_ask(session, call) for call in asked))


async def _ask(session: aiohttp.ClientSession, call: Call) -> Seen:
    sent_at = time.perf_counter()
    first_at, cached_tokens = None, None
    headers = {"content-type": "application/json"}
    async with session.request(call.method, call.path, data=call.content, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if first_at is not None and b'"usage":{' not in line.replace(b" ", b""):
                continue
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if first_at is None and any(choice["delta"].get("content") for choice in chunk["choices"]):
                    first_at = time.perf_counter()
                if usage := chunk.get("usage"):
                    cached_tokens = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    assert first_at is not None and cached_tokens is not None
    worker = response.headers["x-prefixcache-worker"]
    return Seen(worker=worker, sent_at=sent_at, first_at=first_at, cached_tokens=cached_tokens)
