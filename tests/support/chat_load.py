"""Many clients that chat with a fleet of simulated workers and know every answer before it comes."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.support.prompts import filler
from tests.support.sim_oracle import SimOracle

_ANSWER_TIMEOUT_S = 60.0
_ENDLESS_TOKENS = 2_000
"""Of an answer that its client will not wait for."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of all chats, as their clients saw it."""

    chats: Counter[str] = field(default_factory=Counter)
    """By kind, those cut by the client included."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    shared: list[tuple[int, int]] = field(default_factory=list)
    """(prompt tokens, cached tokens) of every completed chat with a shared system prompt."""

    def count(self, kind: str, usage: dict[str, Any], *, is_shared: bool) -> None:
        """A completed chat."""
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        self.chats[kind] += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += cached_tokens
        self.completion_tokens += usage["completion_tokens"]
        if is_shared:
            self.shared.append((usage["prompt_tokens"], cached_tokens))


class ChatLoad:
    """`num_clients` clients, each with one chat at a time, for `duration_s`. Raises at the first wrong answer."""

    def __init__(self, url: str, random: Random, *, num_systems: int = 12, system_words: int = 250) -> None:
        self._url = url + "/v1/chat/completions"
        self._random = random
        self._systems = [filler(system_words, seed=number) for number in range(num_systems)]
        self._oracle = SimOracle()
        self._is_told_to_stop = False
        self.tally = Tally()

    def stop(self) -> None:
        """Every client ends with the chat that it has."""
        self._is_told_to_stop = True

    async def run(self, *, num_clients: int, duration_s: float = math.inf) -> None:
        deadline = time.monotonic() + duration_s
        timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(num_clients):
                clients.create_task(self._client(session, number, deadline))

    async def _client(self, session: aiohttp.ClientSession, number: int, deadline: float) -> None:
        random = Random(f"{self._random.random()}/{number}")
        chats = [self._whole, self._streamed, self._cut_while_whole, self._cut_while_streamed]
        while time.monotonic() < deadline and not self._is_told_to_stop:
            [chat] = random.choices(chats, [10, 10, 1, 2])
            await chat(session, random)

    def _body(self, random: Random) -> tuple[dict[str, Any], bool]:
        """A request, and whether others share its system prompt."""
        is_shared = random.random() < 0.75
        system = random.choice(self._systems) if is_shared else f"Number {random.random()} of all."
        body: dict[str, Any] = {
            "model": "sim",
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": f"Question {random.randrange(30)}, please."},
            ],
            "max_tokens": random.choice([8, 24, 48, 96]),
            "temperature": 0,
        }
        if random.random() < 0.2:
            body |= {"temperature": 1.0, "seed": random.randrange(5)}
        return body, is_shared

    # --- the four kinds of chat -----------------------------------------------------------------------------

    async def _whole(self, session: aiohttp.ClientSession, random: Random) -> None:
        body, is_shared = self._body(random)
        async with session.post(self._url, json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        [choice] = answer["choices"]
        self._check(body, choice["message"]["content"], choice["finish_reason"], answer["usage"])
        self.tally.count("whole", answer["usage"], is_shared=is_shared)

    async def _streamed(self, session: aiohttp.ClientSession, random: Random) -> None:
        body, is_shared = self._body(random)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began = time.monotonic()
        text, reasons, usages, first_at = "", [], [], None
        async with session.post(self._url, json=body) as response, aclosing(events_of_response(response)) as events:
            async for chunk in events:
                usages += [chunk["usage"]] if chunk.get("usage") else []
                for choice in chunk["choices"]:
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                    text += choice["delta"].get("content") or ""
                first_at = first_at or (time.monotonic() if text else None)
        [reason], [usage] = reasons, usages
        self._check(body, text, reason, usage)
        self.tally.count("streamed", usage, is_shared=is_shared)
        self.tally.ttft_s.append((first_at or time.monotonic()) - began)

    async def _cut_while_whole(self, session: aiohttp.ClientSession, random: Random) -> None:
        body = self._endless(random)
        try:
            async with asyncio.timeout(random.uniform(0.01, 1.0)), session.post(self._url, json=body) as response:
                raise AssertionError(f"an answer of {_ENDLESS_TOKENS} tokens came at once: {await response.text()}")
        except TimeoutError:
            self.tally.chats["cut while whole"] += 1

    async def _cut_while_streamed(self, session: aiohttp.ClientSession, random: Random) -> None:
        body = self._endless(random) | {"stream": True}
        num_chars, text = random.randrange(60), ""
        async with session.post(self._url, json=body) as response, aclosing(events_of_response(response)) as events:
            async for chunk in events:
                text += chunk["choices"][0]["delta"].get("content") or ""
                if len(text) > num_chars:
                    break
            response.close()
        expected = self._oracle.answer(body["messages"], max_tokens=len(text) + 8, ignore_eos=True)
        assert expected.text.startswith(text), (text, expected)
        self.tally.chats["cut while streamed"] += 1

    def _endless(self, random: Random) -> dict[str, Any]:
        body, _ = self._body(random)
        return body | {"max_tokens": _ENDLESS_TOKENS, "ignore_eos": True, "temperature": 0}

    def _check(self, body: dict[str, Any], text: str, reason: str, usage: dict[str, Any]) -> None:
        expected = self._oracle.answer(
            body["messages"],
            max_tokens=body["max_tokens"],
            seed=body.get("seed", 0),
            temperature=body["temperature"],
        )
        assert (text, reason) == (expected.text, expected.finish_reason), (body, expected)
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        assert counts == (expected.prompt_tokens, expected.completion_tokens), (body, usage, expected)


async def events_of_response(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream, which must end with [DONE]."""
    assert response.status == 200, await response.text()
    async for line in response.content:
        if not line.startswith(b"data: "):
            assert not line.strip(), line
            continue
        if line == b"data: [DONE]\n":
            return
        chunk: dict[str, Any] = json.loads(line[6:])
        assert "error" not in chunk, chunk
        yield chunk
    raise AssertionError("the stream ended without [DONE]")
