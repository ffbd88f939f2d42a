"""Every part is restarted, one after the other, under load: no request fails behind a balancer that retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.own_server import running_valkey
from tests.support.ports import free_port
from tests.support.program_fleet import Program, ProgramFleet, all_connected, running_fleet
from tests.support.retrying_load import RetryingLoad
from tests.support.seeds import seeded
from tests.support.waiting import eventually

NUM_CLIENTS = 12
NUM_WORKERS = 2
DELAYS_S = ("0", "0.3")
"""Of the first proxy, whose balancer does not look at /ready, and of the second one."""


@asynccontextmanager
async def loaded(load: RetryingLoad) -> AsyncIterator[None]:
    """Clients ask for as long as the block lasts; it is left with the last answer, or their first failure."""
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(num_clients=NUM_CLIENTS))
        try:
            yield
        finally:
            load.stop()


async def restarted(fleet: ProgramFleet, program: Program) -> Program:
    """SIGTERM, a clean exit, and the same command again."""
    await program.stop()
    return fleet.restart(program)


@pytest.mark.parametrize("drain_s", ["30", "0"])
async def test_a_rolling_restart_of_every_part(tmp_path: Path, drain_s: str) -> None:
    """With a drain a worker finishes what it has; without, its streams go on on the other one."""
    async with running_valkey(tmp_path) as redis, running_fleet(tmp_path, redis.url) as fleet:
        flags = ["--drain-timeout", drain_s]
        workers = [fleet.start_worker(f"w{number}", *flags) for number in range(NUM_WORKERS)]
        proxies = [
            await fleet.start_proxy(f"p{number}", "--port", str(free_port()), "--drain-delay", delay_s)
            for number, delay_s in enumerate(DELAYS_S)
        ]
        urls = [proxy.url for proxy in proxies]

        async def all_there() -> None:
            await all_connected(workers, proxies)

        await all_there()
        load = RetryingLoad(urls, seeded(f"rolling restart, drain {drain_s}"))
        async with loaded(load):
            for number in range(NUM_WORKERS):
                workers[number] = await restarted(fleet, workers[number])
                await all_there()
            for number, url in enumerate(urls):
                proxies[number] = await restarted(fleet, proxies[number])
                await proxies[number].said(r"listening http://\S+\n")
                proxies[number].url = url
                await all_there()
            redis.stop()
            answered = sum(load.answered.values())
            await eventually(lambda: sum(load.answered.values()) >= answered + NUM_CLIENTS, 60.0)
            await redis.start()
            await all_there()
        print(f"answered {dict(load.answered)}, asked again after {dict(load.retried)}")
        assert min(load.answered["stream"], load.answered["whole"]) > NUM_CLIENTS
        assert all(program.process.returncode in (None, 0) for program in fleet.programs)
