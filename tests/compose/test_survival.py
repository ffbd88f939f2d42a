"""Every part dies, stands still, is cut off and scaled, at 20 requests a second: clients see what is allowed.

Of everything but a proxy and the edge: no request fails before its first token, no stream is lost, no client has to ask
again. Of those two: what is in their hands is cut, never ended as if whole, and the client's own retry succeeds.
"""

from __future__ import annotations

import asyncio

from tests.compose.account import DOOR, Outcome
from tests.compose.faults import Fault, alone, cut_off, flushed, killed, paused, restarted, scaled
from tests.compose.findings import Findings
from tests.compose.gated import GatedStack
from tests.compose.load import steady_load
from tests.compose.survival import Survival, whole
from tests.compose.upgrade import upgraded

FAULTS: tuple[Fault, ...] = (
    upgraded("first"),
    upgraded("second"),
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


async def test_clients_see_nothing_but_what_is_allowed(simulated: GatedStack, findings: Findings) -> None:
    stack = simulated.stack
    await asyncio.to_thread(simulated.finish)
    await whole(stack)
    async with steady_load(stack.url) as load:
        survival = Survival(stack, load)
        findings.survived = survival.survived
        await survival.warmed_up()
        for fault in FAULTS:
            survived = await survival.undergo(fault)
            print(survived.row(), *survived.problems, sep="\n", flush=True)
    assert [problem for each in survival.survived for problem in each.problems] == []
    assert {account.outcome for account in load.after_cuts} <= {Outcome.RIGHT}, "who is cut asks again"
