"""Twenty chats a second with simulated workers, whatever happens meanwhile; an account of each one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from tests.compose.account import Account, Outcome
from tests.compose.client import Client, open_client
from tests.support.prompts import filler
from tests.support.seeds import seeded
from tests.support.sim_oracle import ExpectedAnswer, SimOracle

REQUESTS_PER_S = 20.0
NUM_SYSTEMS = 8
SYSTEM_WORDS = 150
"""About 1,000 tokens of a simulated worker, which takes bytes for tokens."""
ANSWER_TOKENS = (4, 16, 48, 120)
FORGET_EVERY = 500
RECENT = 40
"""Answers."""


class SteadyLoad:
    """Asks until told to stop. A client whose stream was cut or told of an error asks again, as a program would."""

    def __init__(self, client: Client, random: Random, *, model: str = "sim", rate: float = REQUESTS_PER_S) -> None:
        self._client = client
        self._random = random
        self._model = model
        self._rate = rate
        self._oracle = SimOracle()
        self._systems = [filler(SYSTEM_WORDS, seed=number) for number in range(NUM_SYSTEMS)]
        self._stopping = asyncio.Event()
        self.num_asked = 0
        """Without the second questions after a cut."""
        self._asked_at: set[float] = set()
        """Of the requests in flight."""
        self.accounts: list[Account] = []
        """In the order of their ends."""
        self.after_cuts: list[Account] = []
        """Of the second questions."""

    def stop(self) -> None:
        """Asks nothing more; `run` returns when the last one has its answer."""
        self._stopping.set()

    @property
    def num_in_flight(self) -> int:
        return len(self._asked_at)

    def is_over(self, at: float) -> bool:
        """Whether everything that was asked before `at` has its answer, by time.monotonic()."""
        return not any(asked_at < at for asked_at in self._asked_at)

    def busiest_worker(self) -> str:
        """The name of the one that answered most of late."""
        recent = Counter(account.worker for account in self.accounts[-RECENT:] if account.worker)
        return recent.most_common(1)[0][0]

    def since(self, began_at: float) -> list[Account]:
        """Of the requests that ended since then."""
        return [account for account in self.accounts if account.ended_at >= began_at]

    async def run(self) -> None:
        next_at = time.monotonic()
        async with asyncio.TaskGroup() as clients:
            while not self._stopping.is_set():
                clients.create_task(self._chat())
                self.num_asked += 1
                if self.num_asked % FORGET_EVERY == 0:
                    self._oracle.forget()
                next_at += self._random.expovariate(self._rate)
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))

    async def _chat(self) -> None:
        body, expected = self._drawn()
        asked_at = time.monotonic()
        self._asked_at.add(asked_at)
        try:
            account = await self._client.ask(body, expected)
            self.accounts.append(account)
            if account.outcome in (Outcome.CUT, Outcome.TOLD):
                self.after_cuts.append(await self._client.ask(body, expected))
        finally:
            self._asked_at.remove(asked_at)

    def _drawn(self) -> tuple[Mapping[str, Any], ExpectedAnswer]:
        """A request and what is true of its answer."""
        random = self._random
        messages = [
            {"role": "system", "content": random.choice(self._systems)},
            {"role": "user", "content": f"Question {random.randrange(10**6)}: what then, étienne?"},
        ]
        max_tokens = random.choice(ANSWER_TOKENS)
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if random.random() < 0.6:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body, self._oracle.answer(messages, max_tokens=max_tokens)


@asynccontextmanager
async def steady_load(url: str) -> AsyncIterator[SteadyLoad]:
    """Runs until the block is left; left with the last answer, and no response is unaccounted for."""
    async with open_client(url) as client, asyncio.TaskGroup() as group:
        load = SteadyLoad(client, seeded("load"))
        running = group.create_task(load.run())
        try:
            yield load
        finally:
            load.stop()
            await running
    assert len(load.accounts) == load.num_asked
    assert load.num_in_flight == 0
