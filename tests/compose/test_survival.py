"""Every part dies, stands still, is cut off and scaled, at 20 requests a second: clients see what is allowed.

Of everything but a proxy and the edge: no request fails before its first token, no stream is lost, no client has to ask
again. Of those two: what is in their hands is cut, never ended as if whole, and the client's own retry succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.compose.account import DOOR, Outcome
from tests.compose.client import open_client
from tests.compose.faults import Fault, alone, cut_off, flushed, killed, paused, restarted, scaled
from tests.compose.findings import Findings
from tests.compose.gated import GatedStack
from tests.compose.load import SteadyLoad
from tests.compose.survival import Survival, whole
from tests.support.compose import ComposeStack
from tests.support.seeds import seeded

FAULTS: tuple[Fault, ...] = (
    scaled("worker", 4),
    scaled("worker", 1),
    alone(killed("worker")),
    scaled("worker", 2),
    alone(restarted("proxy"), DOOR),
    # One that is killed is back sooner, as it has no leave to take.
    alone(killed("proxy")),
    scaled("proxy", 3),
    killed("worker"),
    killed("redis"),
    killed("proxy"),
    killed("edge"),
    paused("worker"),
    paused("redis"),
    paused("proxy"),
    paused("edge"),
    cut_off("worker"),
    cut_off("redis"),
    cut_off("proxy"),
    restarted("worker"),
    restarted("redis"),
    restarted("edge"),
    flushed(),
    scaled("proxy", 1),
)


@asynccontextmanager
async def loaded(stack: ComposeStack) -> AsyncIterator[SteadyLoad]:
    """Left with the last answer; no response is unaccounted for."""
    async with open_client(stack.url) as client, asyncio.TaskGroup() as group:
        load = SteadyLoad(client, seeded("load"))
        running = group.create_task(load.run())
        try:
            yield load
        finally:
            load.stop()
            await running
    assert len(load.accounts) == load.num_asked
    assert load.num_in_flight == 0


async def test_clients_see_nothing_but_what_is_allowed(simulated: GatedStack, findings: Findings) -> None:
    stack = simulated.stack
    await asyncio.to_thread(simulated.finish)
    await whole(stack)
    async with loaded(stack) as load:
        survival = Survival(stack, load)
        findings.survived = survival.survived
        await survival.warmed_up()
        for fault in FAULTS:
            survived = await survival.undergo(fault)
            print(survived.row(), *survived.problems, sep="\n", flush=True)
    assert [problem for each in survival.survived for problem in each.problems] == []
    assert {account.outcome for account in load.after_cuts} <= {Outcome.RIGHT}, "who is cut asks again"
