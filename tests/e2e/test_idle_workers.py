"""Two simulated workers, one of which has everything to do at first: the other one takes over what waits."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.program_fleet import Program, all_connected, running_fleet
from tests.support.prompts import filler
from tests.support.valkey import Server
from tests.support.waiting import eventually

SPEED = 0.2
"""2,000 tokens a second: the proxy places all of the burst while the first of it is being prefilled."""
PREFIX_WORDS, PROMPT_WORDS = 60, 240
"""Of some seven bytes, each of them a token."""
LEAST_PREFIX_TOKENS = 6 * PREFIX_WORDS
NUM_ASKED = 10
Answer = tuple[dict[str, str], dict[str, Any]]


@pytest.fixture
async def proxy(valkey: Server, tmp_path: Path) -> AsyncIterator[Program]:
    """One that sends whatever has the prefix to the worker that has it."""
    async with running_fleet(tmp_path, valkey.url) as fleet:
        workers = [fleet.start_worker(name, "--sim-speed", str(SPEED)) for name in ("w1", "w2")]
        proxy = await fleet.start_proxy("p", "--policy", "longest_prefix")
        await all_connected(workers, [proxy])
        yield proxy


async def _ask(session: aiohttp.ClientSession, proxy: Program, text: str) -> Answer:
    body = {"model": "sim", "prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    async with session.post(proxy.url + "/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return dict(response.headers), answer


def _metrics(proxy: Program) -> dict[str, float]:
    """Sums over all labels, and `name outcome` where there is one."""
    with urllib.request.urlopen(proxy.url + "/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    sums: defaultdict[str, float] = defaultdict(float)
    for sample in (sample for family in families for sample in family.samples):
        sums[sample.name] += sample.value
        sums[f"{sample.name} {sample.labels.get('outcome')}"] += sample.value
    return sums


async def test_what_waits_moves_to_the_worker_that_has_nothing_to_do(proxy: Program) -> None:
    prefix = filler(PREFIX_WORDS, seed=1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        headers, _ = await _ask(session, proxy, prefix + filler(PROMPT_WORDS - PREFIX_WORDS, seed=2))
        first = headers["x-prefixcache-worker"]
        texts = [prefix + filler(PROMPT_WORDS - PREFIX_WORDS, seed=100 + number) for number in range(NUM_ASKED)]
        answers = await asyncio.gather(*(_ask(session, proxy, text) for text in texts))
    shares = Counter(headers["x-prefixcache-worker"] for headers, _ in answers)
    stolen = [(headers, answer) for headers, answer in answers if headers["x-prefixcache-reason"] == "stolen"]
    assert {headers["x-prefixcache-worker"] for headers, _ in stolen} == {"w1", "w2"} - {first}
    assert len(stolen) == shares.total() - shares[first] >= NUM_ASKED // 4, "half of it, if nothing were lost"
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in stolen]
    predicted = [int(headers["x-prefixcache-hit-tokens"]) for headers, _ in stolen]
    assert min(cached) == 0 and max(cached) >= LEAST_PREFIX_TOKENS - 64, "the first one brought the prefix along"
    assert max(predicted) >= LEAST_PREFIX_TOKENS // 2, "and the proxy knew"
    metrics = _metrics(proxy)
    assert metrics["prefixcache_steals_total moved"] == len(stolen)
    assert metrics["prefixcache_pending_claims_total"] == 2 * (1 + NUM_ASKED), "each placed once, and settled"
    await eventually(lambda: not _metrics(proxy)["prefixcache_num_requests_running"])
