"""Clients behind a balancer: requests at a steady mean rate, each judged when it is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random

from tests.chaos.deployment import Deployment, Proxy
from tests.chaos.hostile import HOSTILE
from tests.chaos.judge import judge, judge_refusal
from tests.chaos.tally import Outcome, Tally, Verdict
from tests.support.bare_client import Leave, Reply, ask
from tests.support.sim_oracle import SimOracle
from tests.support.sim_requests import SimRequests

REQUESTS_PER_S = 20.0
MOST_STAY_S = 2.0
"""Of a client that leaves: at 11 ms a token, the oracle's truth reaches further."""
TAKEN_WITHIN_S = 10.0
AGAIN_PAUSE_S = 0.05
FORGET_EVERY = 500

ANSWERABLE = WHOLE, STREAM = "answerable, whole", "answerable, stream"
LEAVING, HOSTILE_KIND = "its client leaves", "hostile"


class Load:
    """Asks until told to stop."""

    def __init__(self, deployment: Deployment, random: Random) -> None:
        self._deployment = deployment
        self._random = random
        self._oracle = SimOracle()
        self._requests = SimRequests(random, self._oracle)
        self._stopping = asyncio.Event()
        self.tally = Tally()

    def stop(self) -> None:
        """Asks nothing more; `run` returns when the last one has its answer."""
        self._stopping.set()

    async def run(self) -> None:
        next_at = time.monotonic()
        num_asked = 0
        async with asyncio.TaskGroup() as clients:
            while not self._stopping.is_set():
                clients.create_task(self._client())
                num_asked += 1
                if num_asked % FORGET_EVERY == 0:
                    self._oracle.forget()
                next_at += self._random.expovariate(REQUESTS_PER_S)
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))

    async def _client(self) -> None:
        drawn = self._random.random()
        if drawn < 0.7:
            await self._ordinary()
        elif drawn < 0.88:
            await self._leaving()
        else:
            await self._hostile()

    async def _ordinary(self) -> None:
        asked = self._requests.ordinary()

        def judged(reply: Reply, was_killed: bool) -> Verdict:
            verdict = judge(asked, reply, was_killed=was_killed)
            if verdict.outcome is Outcome.RIGHT and asked.is_stream:
                self.tally.longest_gaps.append(reply.longest_gap)
            return verdict

        await self._ask(STREAM if asked.is_stream else WHOLE, asked.content, None, judged)

    async def _leaving(self) -> None:
        asked = self._requests.endless()
        leave = Leave(after_s=self._random.uniform(0.0, MOST_STAY_S), how=self._random.choice(["fin", "rst"]))
        await self._ask(LEAVING, asked.content, leave, lambda reply, killed: judge(asked, reply, was_killed=killed))

    async def _hostile(self) -> None:
        hostile = self._random.choice(HOSTILE)
        leave = None if hostile.statuses else Leave(after_s=self._random.uniform(0.0, MOST_STAY_S), how="fin")
        await self._ask(
            HOSTILE_KIND, hostile.request, leave, lambda reply, _: judge_refusal(hostile.statuses, reply, hostile.name)
        )

    async def _ask(
        self, kind: str, request: bytes, leave: Leave | None, judged: Callable[[Reply, bool], Verdict]
    ) -> None:
        """Of one proxy after the other, as long as those that are away have not answered a byte."""
        deadline = time.monotonic() + TAKEN_WITHIN_S
        first = self._random.randrange(len(self._deployment.proxies))
        attempt = 0
        while True:
            proxy = self._deployment.proxies[(first + attempt) % len(self._deployment.proxies)]
            reply = await ask(proxy.port, request, leave=leave)
            if (why := _not_taken(proxy, reply)) is None:
                break
            self.tally.asked_again[why] += 1
            if time.monotonic() > deadline:
                self.tally.add(kind, Verdict(outcome=Outcome.NOT_TAKEN, why=why))
                return
            attempt += 1
            await asyncio.sleep(AGAIN_PAUSE_S)
        try:
            verdict = judged(reply, proxy.killed_at >= reply.asked_at)
        except Exception as error:
            verdict = Verdict(outcome=Outcome.WRONG, why=f"{error!r} over {reply.status} {reply.content[-300:]!r}")
        self.tally.add(kind, verdict)


def _not_taken(proxy: Proxy, reply: Reply) -> str | None:
    """Why the next proxy is asked."""
    if proxy.away_until < reply.asked_at:
        return None
    if reply.status is None and reply.end in ("unanswered", "no connection"):
        return f"{reply.end}: it was killed or told to end"
    if reply.status == 503 and b"shutting down" in reply.content:
        return "503: it is shutting down"
    return None
