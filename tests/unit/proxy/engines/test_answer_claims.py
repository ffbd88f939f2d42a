"""Answers that are over: claimed one after the other, let go where many wait, and not of a cache that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefixcache.limits import LARGE_BODY_BYTES, MAX_KEPT_ANSWERS, MAX_KEPT_PROMPT_BYTES, MAX_QUEUED_ANSWERS
from prefixcache.rendering.engine_prompt import EnginePrompt, EnginePrompts
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from prefixcache.types import EngineGeometry, Unit
from proxy.engines.answer_claims import AnswerClaims, AnsweredChat
from proxy.engines.answer_text import KeptAnswer
from proxy.engines.engine_link import EngineLink
from proxy.engines.prompt_geometry import PromptGeometry
from proxy.engines.usage import Usage
from tests.support.waiting import eventually

PROMPT_CHAIN = [1, 2]


class Prompts:
    """Answers with a chain for each text."""

    def __init__(self, **chains: Sequence[int]) -> None:
        self.chains = chains
        self.read: list[str] = []

    def answered(self, parsed: object, prompt: EnginePrompt, text: str) -> Sequence[int]:
        assert parsed == {"messages": []}
        self.read.append(text)
        return self.chains[text]


class Link:
    """What is claimed of it."""

    def __init__(self) -> None:
        self.incarnation = 7
        self.capacity_blocks = 100
        self.claims = self
        self.claimed: list[Sequence[int]] = []

    def claim(self, chain: Sequence[int], *, capacity_blocks: int, engine_blocks_per_index_block: float) -> None:
        assert (capacity_blocks, engine_blocks_per_index_block) == (100, 4.0)
        self.claimed.append(chain)


def answered(
    prompts: Prompts,
    link: Link,
    text: str | None,
    *,
    num_units: int = 150,
    num_tokens: int | None = None,
    unit: Unit = "token",
) -> AnsweredChat:
    engine = EngineGeometry(unit=unit)
    prompt = EnginePrompt(
        tail=b"", geometry=engine, root=0, num_units=num_units, chain=PROMPT_CHAIN, prompt_tokens_estimate=num_units
    )
    answer = SimpleNamespace(text=lambda: text, usage=Usage(completion_tokens=num_tokens))
    return AnsweredChat(
        body=b'{"messages":[]}',
        prompts=cast(EnginePrompts, prompts),
        prompt=prompt,
        answer=cast(KeptAnswer, answer),
        link=cast(EngineLink, link),
        incarnation=7,
        geometry=PromptGeometry(engine=engine, tokens_per_unit=1.0),
    )


@asynccontextmanager
async def running() -> AsyncIterator[AnswerClaims]:
    with ThreadPoolExecutor(1) as executor:
        claims = AnswerClaims(TokenizingThreads(executor))
        task = asyncio.create_task(claims.run())
        try:
            yield claims
        finally:
            task.cancel()


async def test_a_longer_chain_is_claimed_and_no_other() -> None:
    prompts, link = Prompts(more=[1, 2, 3], same=[1, 2], last=[1, 2, 4, 5]), Link()
    async with running() as claims:
        for text in ("more", "same", None, "", "last"):
            claims.offer(answered(prompts, link, text))
        await eventually(lambda: prompts.read == ["more", "same", "last"])
        await eventually(lambda: link.claimed == [[1, 2, 3], [1, 2, 4, 5]])


async def test_nothing_is_claimed_of_a_cache_that_is_gone() -> None:
    prompts, link = Prompts(a=[1, 2, 3], b=[1, 2, 4]), Link()
    lost = Link()
    lost.incarnation = 8
    async with running() as claims:
        claims.offer(answered(prompts, lost, "a"))
        claims.offer(answered(prompts, link, "b"))
        await eventually(lambda: link.claimed == [[1, 2, 4]])
        assert not lost.claimed


async def test_what_fails_takes_nothing_else_along(caplog: pytest.LogCaptureFixture) -> None:
    prompts, link = Prompts(good=[1, 2, 3]), Link()
    async with running() as claims:
        claims.offer(answered(prompts, link, "unknown"))
        claims.offer(answered(prompts, link, "good"))
        await eventually(lambda: link.claimed == [[1, 2, 3]])
    assert "claiming an answer failed" in caplog.text


@pytest.mark.parametrize(
    ("fields", "is_read"),
    [
        ({"num_units": 150, "num_tokens": 42}, False),  # 192 tokens: the last one is not computed
        ({"num_units": 150, "num_tokens": 43}, True),
        ({"num_units": 150, "num_tokens": None}, True),
        ({"num_units": 150, "num_tokens": 1, "unit": "byte"}, True),
    ],
)
async def test_an_answer_that_fills_no_block_is_not_read(fields: dict[str, Any], is_read: bool) -> None:
    prompts, link = Prompts(first=[1, 2, 3], last=[1, 2, 4]), Link()
    async with running() as claims:
        claims.offer(answered(prompts, link, "first", **fields))
        claims.offer(answered(prompts, link, "last"))
        await eventually(lambda: [1, 2, 4] in link.claimed)
    assert ("first" in prompts.read) == is_read


async def test_where_many_wait_the_next_one_is_let_go() -> None:
    with ThreadPoolExecutor(1) as executor:
        claims = AnswerClaims(TokenizingThreads(executor))
        prompts, link = Prompts(a=[1, 2, 3]), Link()
        for _ in range(MAX_QUEUED_ANSWERS + 1):
            claims.offer(answered(prompts, link, "a"))
        task = asyncio.create_task(claims.run())
        await eventually(lambda: len(link.claimed) == MAX_QUEUED_ANSWERS)
        claims.offer(answered(prompts, link, "a"))
        await eventually(lambda: len(link.claimed) == MAX_QUEUED_ANSWERS + 1)
        task.cancel()


def test_so_many_answers_are_kept_at_once() -> None:
    claims = AnswerClaims(cast(TokenizingThreads, None))
    with ExitStack() as scope:
        assert all(claims.keeps(b"", scope) for _ in range(MAX_KEPT_ANSWERS))
        assert not claims.keeps(b"", scope)
    with ExitStack() as scope:
        assert claims.keeps(b"", scope)


def test_bodies_of_so_many_bytes_are_kept_with_them() -> None:
    claims = AnswerClaims(cast(TokenizingThreads, None))
    body = bytes(LARGE_BODY_BYTES - 1)
    with ExitStack() as scope:
        assert not claims.keeps(bytes(LARGE_BODY_BYTES), scope)
        assert sum(claims.keeps(body, scope) for _ in range(MAX_KEPT_ANSWERS)) == MAX_KEPT_PROMPT_BYTES // len(body)
        assert claims.keeps(bytes(MAX_KEPT_PROMPT_BYTES % len(body)), scope) and not claims.keeps(b"x", scope)
    with ExitStack() as scope:
        assert claims.keeps(body, scope)
