"""Redis stands still, dies and is emptied under load: no request fails, and prefixes are found again soon after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.chat_load import ChatLoad
from tests.support.own_server import OwnServer, running_valkey
from tests.support.program_fleet import all_connected, all_ready, running_fleet
from tests.support.seeds import seeded
from tests.support.waiting import eventually

NUM_WORKERS = 3
NUM_CLIENTS = 8
"""Of each proxy."""
FAULT_S = 4.0
WINDOW_S = 3.0
"""In which a hit rate is taken."""
BACK_S = 60.0
AS_BEFORE = 0.9
"""A hit rate is back at this share of what it was."""


async def stand_still(redis: OwnServer) -> None:
    with redis.paused():
        await asyncio.sleep(FAULT_S)


async def die(redis: OwnServer) -> None:
    """It comes back empty, at the same address."""
    redis.kill()
    await asyncio.sleep(FAULT_S)
    await redis.start()


async def lose_all(redis: OwnServer) -> None:
    await asyncio.to_thread(redis.flush)


@asynccontextmanager
async def under_load(loads: Sequence[ChatLoad]) -> AsyncIterator[None]:
    """Left with the last answers; fails with the first that is wrong or no answer."""
    async with asyncio.TaskGroup() as group:
        for load in loads:
            group.create_task(load.run(num_clients=NUM_CLIENTS))
        try:
            yield
        finally:
            for load in loads:
                load.stop()


async def hit_rate(loads: Sequence[ChatLoad]) -> float:
    """Of the chats that are completed within a window."""
    before = [(load.tally.cached_tokens, load.tally.prompt_tokens) for load in loads]
    await asyncio.sleep(WINDOW_S)  # the span that is measured
    cached = sum(load.tally.cached_tokens - cached for load, (cached, _) in zip(loads, before, strict=True))
    prompt = sum(load.tally.prompt_tokens - prompt for load, (_, prompt) in zip(loads, before, strict=True))
    assert prompt, "nothing was answered"
    return cached / prompt


async def settled_hit_rate(loads: Sequence[ChatLoad]) -> float:
    """Of a window that is no better than the one before."""
    last, now = -1.0, await hit_rate(loads)
    while now > last:
        last, now = now, await hit_rate(loads)
    return now


@pytest.mark.parametrize("fault", [stand_still, die, lose_all])
async def test_no_request_fails_and_the_hit_rate_comes_back(
    tmp_path: Path, fault: Callable[[OwnServer], Awaitable[None]]
) -> None:
    async with running_valkey(tmp_path) as redis, running_fleet(tmp_path, redis.url) as fleet:
        workers = [fleet.start_worker(f"w{number}") for number in range(NUM_WORKERS)]
        proxies = [await fleet.start_proxy(f"p{number}") for number in range(2)]
        await all_connected(workers, proxies)
        loads = [ChatLoad(proxy.url, seeded(f"{fault.__name__}, {proxy.name}")) for proxy in proxies]
        async with under_load(loads):
            usual = await settled_hit_rate(loads)
            num_before = sum(sum(load.tally.chats.values()) for load in loads)
            await fault(redis)
            num_during = sum(sum(load.tally.chats.values()) for load in loads) - num_before
            over_at = time.monotonic()
            rates: list[float] = []

            async def is_back() -> bool:
                rates.append(await hit_rate(loads))
                return rates[-1] >= AS_BEFORE * usual

            await eventually(is_back, BACK_S)
            took_s = time.monotonic() - over_at
        print(f"{fault.__name__}: {num_during} chats meanwhile; hit rate {usual:.2f}, then", end=" ")
        print(", ".join(f"{rate:.2f}" for rate in rates), f"({took_s:.0f} s)")
        for proxy in proxies:
            await all_ready(proxy, NUM_WORKERS)
