"""Clients behind a balancer of their own: another proxy is asked as long as no byte of an answer has come."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from random import Random
from typing import Any

import aiohttp

from tests.support.chat_load import events_of_response
from tests.support.prompts import filler
from tests.support.sim_oracle import SimOracle

_ANSWER_TIMEOUT_S = 60.0
_PAUSE_S = 0.02
_MOST_ATTEMPTS = 500
"""Ten seconds in which no proxy takes the request."""


class RetryingLoad:
    """Chats with simulated workers until told to stop. Raises at the first wrong, lost or broken answer."""

    def __init__(self, urls: Sequence[str], random: Random, *, num_systems: int = 6) -> None:
        self._urls = urls
        self._random = random
        self._systems = [filler(150, seed=number) for number in range(num_systems)]
        self._oracle = SimOracle()
        self._stopping = asyncio.Event()
        self.answered: Counter[str] = Counter()
        """By the kind of answer."""
        self.retried: Counter[str] = Counter()
        """By why the proxy that was asked first had no answer."""

    def stop(self) -> None:
        """Every client ends with the chat that it has."""
        self._stopping.set()

    async def run(self, *, num_clients: int) -> None:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(num_clients):
                clients.create_task(self._client(session, Random(f"{self._random.random()}/{number}")))

    async def _client(self, session: aiohttp.ClientSession, random: Random) -> None:
        while not self._stopping.is_set():
            body = {
                "model": "sim",
                "messages": [
                    {"role": "system", "content": random.choice(self._systems)},
                    {"role": "user", "content": f"Question {random.randrange(50)}, please."},
                ],
                "max_tokens": random.choice([4, 16, 64]),
                "temperature": 0,
                "stream": random.random() < 0.5,
            }
            first = random.randrange(len(self._urls))
            for attempt in range(_MOST_ATTEMPTS):
                if await self._asked(session, self._urls[(first + attempt) % len(self._urls)], body):
                    break
                await asyncio.sleep(_PAUSE_S)
            else:
                raise AssertionError(f"nobody has answered, {dict(self.retried)}")

    async def _asked(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bool:
        """False if the proxy sent no byte of an answer, or a 503."""
        try:
            response = await session.post(url + "/v1/chat/completions", json=body)
        except aiohttp.ClientConnectionError as error:
            self.retried[type(error).__name__] += 1
            return False
        async with response:
            if response.status == 503:
                self.retried[(await response.json())["error"]["message"]] += 1
                return False
            text, reason = await (self._streamed if body["stream"] else self._whole)(response)
        expected = self._oracle.answer(body["messages"], max_tokens=body["max_tokens"])
        assert (text, reason) == (expected.text, expected.finish_reason), (url, text, expected)
        self.answered["stream" if body["stream"] else "whole"] += 1
        return True

    async def _whole(self, response: aiohttp.ClientResponse) -> tuple[str, str]:
        answer = await response.json()
        assert response.status == 200, answer
        [choice] = answer["choices"]
        return choice["message"]["content"], choice["finish_reason"]

    async def _streamed(self, response: aiohttp.ClientResponse) -> tuple[str, str]:
        assert response.status == 200, await response.text()
        text, reasons = "", []
        async with aclosing(events_of_response(response)) as events:
            async for chunk in events:
                assert "error" not in chunk, json.dumps(chunk)
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        [reason] = reasons
        return text, reason
