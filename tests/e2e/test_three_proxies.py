"""Three proxies and eight simulated workers on one Valkey: what one proxy decides, the others know."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prefixcache.load import IncarnationLoad
from prefixcache.store import RedisStore
from tests.support.chat_load import ChatLoad
from tests.support.program_fleet import Program, ProgramFleet, all_connected, get_json, running_fleet
from tests.support.prompts import filler
from tests.support.seeds import seeded
from tests.support.valkey import Server
from tests.support.waiting import eventually

NUM_WORKERS = 8
NUM_PROXIES = 3
SPEED = 0.25
"""A quarter of the simulated engine's usual speed: two real cores carry all eleven programs."""
BURST_SPEED = 0.05
"""So slow that a burst has arrived while the first of it is being prefilled, also on a busy machine."""
BURST = 200
PROMPT_TOKENS = 6 * 64 + 60
"""Six index blocks, and of a seventh as much as there may be."""
LOAD_SECONDS = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    fleet: ProgramFleet
    proxies: list[Program]
    store: RedisStore

    def url(self, number: int) -> str:
        return self.proxies[number % NUM_PROXIES].url


@pytest.fixture(params=[SPEED])
async def deployment(valkey: Server, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    async with running_fleet(tmp_path, valkey.url) as fleet, RedisStore.open(valkey.url) as store:
        flags = ["--sim-speed", str(request.param)]
        workers = [fleet.start_worker(f"w{number}", *flags) for number in range(NUM_WORKERS)]
        proxies = [await fleet.start_proxy(f"p{number}") for number in range(NUM_PROXIES)]
        await all_connected(workers, proxies)
        yield Deployment(fleet=fleet, proxies=proxies, store=store)


async def chat(
    session: aiohttp.ClientSession, url: str, text: str, *, max_tokens: int = 2
) -> tuple[str, dict[str, Any]]:
    """The worker that answered, and the usage."""
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return response.headers["x-prefixcache-worker"], answer["usage"]


def session_without_limits() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))


async def learn_rates(session: aiohttp.ClientSession, deployment: Deployment) -> None:
    """Every worker has prefilled something, so that its rate is known to all."""
    number = 0

    async def known() -> bool:
        nonlocal number
        number += 1
        texts = [filler(70, seed=10_000 * number + place) for place in range(2 * NUM_WORKERS)]
        await asyncio.gather(*(chat(session, deployment.url(place), text) for place, text in enumerate(texts)))
        loads = await all_loads(deployment)
        rates = [load.worker.prefill_rate for load in loads.values() if load.worker is not None]
        return len(rates) == NUM_WORKERS and min(rates) > 0

    await eventually(known, 60.0)


async def all_loads(deployment: Deployment) -> Mapping[int, IncarnationLoad]:
    """What stands in Redis about every incarnation."""
    workers = await deployment.store.registry().live_workers()
    (namespace,) = {worker.namespace for worker in workers}
    index = deployment.store.index(namespace)
    return await index.exchange_loads("f" * 16, {}, [worker.incarnation for worker in workers])


@pytest.mark.parametrize("deployment", [BURST_SPEED], indirect=True)
async def test_a_burst_of_equal_prompts_meets_until_the_wait_outweighs_the_prefill(deployment: Deployment) -> None:
    """Alone, the prompt takes u seconds. One worker is given it, and those that follow as long as its wait is below u.

    A follower is taken to compute what lies behind the last full index block, so the wait of one worker outweighs the
    prefill after u / that, seven here. Each of the three proxies may give so many before it hears of the others': far
    fewer than twice the fair share together. Then the next worker computes the prompt once.
    """
    async with session_without_limits() as session:
        await learn_rates(session, deployment)
        _, usage = await chat(session, deployment.url(0), "x")
        text = filler(200, seed=1)[: PROMPT_TOKENS + 1 - usage["prompt_tokens"]]  # a token a byte, and the template's
        answers = await asyncio.gather(*(chat(session, deployment.url(number), text) for number in range(BURST)))
    shares = Counter(worker for worker, _ in answers)
    prompt_tokens = answers[0][1]["prompt_tokens"]
    computed = [usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] for _, usage in answers]
    cold = sum(tokens == prompt_tokens for tokens in computed)
    print(f"{prompt_tokens} tokens, shares {sorted(shares.values(), reverse=True)}, {cold} computed it whole")
    assert cold <= len(shares), "nobody computes the same prompt twice"
    assert max(shares.values()) >= 10, "they meet"
    assert max(shares.values()) <= 2 * BURST / NUM_WORKERS, "but not beyond twice the fair share"
    assert sum(computed) <= len(shares) * prompt_tokens + BURST * 80


async def test_a_mixed_load_is_shared_fairly_and_answered_rightly(deployment: Deployment) -> None:
    loads = [ChatLoad(proxy.url, seeded(f"load on {proxy.name}"), num_systems=6) for proxy in deployment.proxies]
    await asyncio.gather(*(load.run(num_clients=16, duration_s=LOAD_SECONDS) for load in loads))
    workers = (await get_json(deployment.url(0) + "/health"))["workers"]
    counts = {worker["id"]: await num_requests(worker["address"]) for worker in workers}
    total = sum(counts.values())
    hit_rate = sum(load.tally.cached_tokens for load in loads) / sum(load.tally.prompt_tokens for load in loads)
    print(f"{total} requests, shares {sorted(counts.values(), reverse=True)}, hit rate {hit_rate:.2f}")
    assert max(counts.values()) <= 2 * total / NUM_WORKERS
    assert hit_rate > 0.3


async def num_requests(address: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
        text = await response.text()
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("prefixcache_worker_requests_total")
    )


async def test_the_load_of_a_killed_proxy_is_gone_after_three_seconds(deployment: Deployment) -> None:
    doomed, witness = deployment.proxies[2], deployment.proxies[0]
    async with session_without_limits() as session:
        await learn_rates(session, deployment)
        texts = [filler(1_500, seed=500 + number) for number in range(6 * NUM_WORKERS)]
        asking = [asyncio.create_task(chat(session, doomed.url, text, max_tokens=500)) for text in texts]
        try:
            await eventually(lambda: has_load(witness), 10.0)
            doomed.kill()
            killed_at = time.monotonic()
            await eventually(lambda: no_proxy_has_load(deployment), 4.0)
            took_s = time.monotonic() - killed_at
            print(f"load back to zero after {took_s:.2f} s")
            assert took_s < 3.5
            await eventually(lambda: is_idle(witness), 2.0)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def has_load(proxy: Program) -> bool:
    """The witness has sent nothing: what it sees are the others' requests."""
    workers = (await get_json(proxy.url + "/health"))["workers"]
    return all(worker["running"] + worker["waiting"] > 0 for worker in workers) and any(
        worker["ahead_s"] > 0 for worker in workers
    )


async def is_idle(proxy: Program) -> bool:
    workers = (await get_json(proxy.url + "/health"))["workers"]
    return all(worker["running"] + worker["waiting"] + worker["ahead_s"] == 0 for worker in workers)


async def no_proxy_has_load(deployment: Deployment) -> bool:
    loads = await all_loads(deployment)
    return not any(
        proxy.running or proxy.prefilling_s or any(proxy.waiting_s)
        for load in loads.values()
        for proxy in load.proxies.values()
    )
