"""The load of the compose tests against programs of this machine: what it tells of a fault is what was done."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.compose.account import NOTHING, STREAMS, Outcome
from tests.compose.load import SteadyLoad, steady_load
from tests.compose.recovery import hit_rate
from tests.support.ports import free_port
from tests.support.program_fleet import Program, ProgramFleet, all_connected, running_fleet
from tests.support.valkey import Server
from tests.support.waiting import eventually

NUM_WORKERS = 2
WAIT_S = 30.0


@asynccontextmanager
async def loaded(url: str) -> AsyncIterator[SteadyLoad]:
    """With 40 answers given already."""
    async with steady_load(url) as load:
        await answered(load, 40)
        yield load


async def answered(load: SteadyLoad, number: int) -> None:
    """Returns when so many more are."""
    until = len(load.accounts) + number
    await eventually(lambda: len(load.accounts) >= until, WAIT_S)


async def started(fleet: ProgramFleet) -> tuple[list[Program], Program]:
    workers = [fleet.start_worker(f"w{number}") for number in range(NUM_WORKERS)]
    proxy = await fleet.start_proxy("proxy", "--port", str(free_port()))
    await all_connected(workers, [proxy])
    return workers, proxy


async def test_a_worker_that_is_killed_costs_clients_nothing(valkey: Server, tmp_path: Path) -> None:
    async with running_fleet(tmp_path, valkey.url) as fleet:
        workers, proxy = await started(fleet)
        async with loaded(proxy.url) as load:
            workers[0].kill()
            await answered(load, 40)
        assert NOTHING.broken_by(load.accounts) == []
        assert {account.is_stream for account in load.accounts} == {True, False}
        assert 0.5 < hit_rate(load.accounts[-20:]) < 1.0


async def test_a_proxy_that_is_killed_cuts_its_streams_and_the_client_asks_again(
    valkey: Server, tmp_path: Path
) -> None:
    async with running_fleet(tmp_path, valkey.url) as fleet:
        _workers, proxy = await started(fleet)
        async with loaded(proxy.url) as load:
            await eventually(lambda: load.num_in_flight >= 4, WAIT_S)
            proxy.kill()
            await eventually(lambda: any(account.outcome is Outcome.CUT for account in load.accounts), WAIT_S)
            again = fleet.restart(proxy)
            await again.said(r"listening http://\S+\n")
            await answered(load, 40)
        outcomes = Counter(account.outcome for account in load.accounts)
        print(outcomes, [account.why for account in load.accounts if account.outcome is Outcome.CUT])
        assert outcomes[Outcome.CUT] and NOTHING.broken_by(load.accounts)
        # While the only proxy is away for longer than the client's patience, it fails by name: nothing is worse.
        assert set(outcomes) <= {Outcome.RIGHT, Outcome.CUT, Outcome.FAILED}
        assert any(account.failed_attempts for account in load.accounts)
        right_again = [account for account in load.accounts[-20:] if not STREAMS.broken_by([account])]
        assert len(right_again) == 20
