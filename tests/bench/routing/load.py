"""Chats of several turns through one or more proxies, and what their clients see."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.bench.routing.sizes import Workload

ANSWER_TIMEOUT_S = 60.0
_WORDS = (
    "alpha bravo carbon delta engine forest garden harbor island jungle kettle lemon marble needle ocean pepper quartz "
    "river silver timber umbrella valley window yellow zebra anchor bridge copper desert ember falcon glacier hammer "
    "insect jacket kingdom ladder magnet nickel orbit planet ribbon saddle tunnel velvet walnut"
).split()


@dataclass(slots=True, kw_only=True)
class Chat:
    """A conversation and its user, who says the same in every run of a seed."""

    number: int
    messages: list[dict[str, str]]
    random: Random
    num_asked: int = 0

    def ask(self, num_words: int) -> None:
        said = f"Turn {self.num_asked} of chat {self.number}: {words(self.random, num_words)}"
        self.messages.append({"role": "user", "content": said})
        self.num_asked += 1


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the clients of one run saw."""

    num_requests: int = 0
    num_errors: int = 0
    ttft_s: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """Of our proxy's decisions."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    over_predicted_tokens: int = 0
    """Predicted by our proxy and not cached."""
    under_predicted_tokens: int = 0
    """Cached and not predicted."""

    def count(self, headers: Any, usage: dict[str, Any]) -> None:
        """A whole answer."""
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += cached_tokens
        if reason := headers.get("x-prefixcache-reason"):
            self.reasons[reason] += 1
            missing_tokens = int(headers.get("x-prefixcache-hit-tokens", 0)) - cached_tokens
            self.over_predicted_tokens += max(missing_tokens, 0)
            self.under_predicted_tokens += max(-missing_tokens, 0)


def words(random: Random, number: int) -> str:
    return " ".join(random.choice(_WORDS) for _ in range(number))


def new_chats(workload: Workload, seed: int, salt: Sequence[str] = ()) -> list[Chat]:
    """All of one run; those of different seeds, or with other words of salt, share nothing."""
    random = Random(seed)
    head = " ".join(("System", *salt))
    systems = [f"{head} {number}. {words(random, workload.system_words)}" for number in range(workload.num_systems)]
    return [
        Chat(
            number=number,
            messages=[{"role": "system", "content": random.choice(systems)}],
            random=Random(seed * 1000 + number),
        )
        for number in range(workload.num_chats)
    ]


async def run_chats(urls: Sequence[str], workload: Workload, seed: int) -> Tally:
    """Every chat to its end, a turn of each after a turn of all others; requests alternate in `urls`."""
    tally = Tally()
    await talk(urls, new_chats(workload, seed), workload, workload.num_turns, tally)
    return tally


async def talk(urls: Sequence[str], chats: Sequence[Chat], workload: Workload, num_turns: int, tally: Tally) -> None:
    """Goes on with `chats`, in turns, until each has asked `num_turns` times."""
    waiting = deque(chats)
    num_left = sum(num_turns - chat.num_asked for chat in chats)
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal num_left
        while num_left > 0:
            if not waiting:
                await asyncio.sleep(0.005)  # the other clients have the last chats
                continue
            chat = waiting.popleft()
            chat.ask(workload.user_words)
            url = urls[tally.num_requests % len(urls)]
            tally.num_requests += 1
            answer = await _ask(session, url, chat, workload, tally)
            chat.messages.append({"role": "assistant", "content": answer})
            num_left -= 1
            if chat.num_asked < num_turns:
                waiting.append(chat)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as clients:
        for _ in range(workload.num_clients):
            clients.create_task(client(session))


async def _ask(session: aiohttp.ClientSession, url: str, chat: Chat, workload: Workload, tally: Tally) -> str:
    body = {
        "model": workload.model,
        "messages": chat.messages,
        "max_tokens": workload.answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts: list[str] = []
    usage: dict[str, Any] | None = None
    began_s = time.perf_counter()
    try:
        async with session.post(url + "/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        if not texts:
                            tally.ttft_s.append(time.perf_counter() - began_s)
                        texts.append(text)
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
        usage = None
    if usage is None:
        tally.num_errors += 1
        return "error"
    tally.count(response.headers, usage)
    return "".join(texts)
