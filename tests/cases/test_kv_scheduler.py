"""Class kv-scheduler: blocks are reused exactly where their content is right, and one request stops nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from tests.cases.catalogue import Call, call_of, changed
from tests.cases.outcome import Outcome
from tests.cases.world import MODEL, RESERVED, World, open_world
from tests.support.seeds import seeded
from tests.support.valkey import Server
from tests.support.waiting import eventually

TIMES = 3


def _completion(prompt: Sequence[int], **fields: Any) -> Call:
    body = {"model": MODEL, "prompt": list(prompt), "temperature": 0}
    return changed(Call(method="POST", path="/v1/completions", content=b"{}"), **body, **fields)


@pytest.mark.parametrize(("num_tokens", "cached_tokens"), [(16, 0), (32, 16), (48, 32)])
async def test_rw_120_a_whole_prompt_in_the_cache(valkey: Server, num_tokens: int, cached_tokens: int) -> None:
    async with open_world(valkey) as world:
        (given,) = world.calls("RW-120")
        assert len(given.body["prompt"]) == 32
        prompt = world.placeholders.ids(num_tokens)
        outcomes = [await world.send(changed(given, prompt=prompt)) for _ in range(TIMES)]
        assert world.prompts == [prompt] * TIMES
        assert {outcome.text for outcome in outcomes} == {world.decoded(world.output(prompt, 8))}
        assert [outcome.cached_tokens for outcome in outcomes] == [0, cached_tokens, cached_tokens]


POOL_BLOCKS = 16
POOL_TOKENS = POOL_BLOCKS * 16


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"), [(POOL_TOKENS + 16, 1), (POOL_TOKENS - 8, 32), (POOL_TOKENS, 1)]
)
async def test_rw_122_what_never_fits_is_refused_at_once(valkey: Server, prompt_tokens: int, max_tokens: int) -> None:
    async with open_world(valkey, num_blocks=POOL_BLOCKS, max_model_len=100 * POOL_TOKENS) as world:
        big = _completion(world.placeholders.ids(prompt_tokens), max_tokens=max_tokens)
        small = [_completion(world.placeholders.ids(10 + number), max_tokens=4) for number in range(10)]
        refused, *others = await asyncio.gather(*(world.send(call) for call in (big, *small)))
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert str(POOL_TOKENS) in refused.error["message"]
        assert [outcome.status for outcome in others] == [200] * 10
        assert len(world.prompts) == 10


async def test_rw_122_an_answer_that_fills_the_pool(valkey: Server) -> None:
    async with open_world(valkey, num_blocks=POOL_BLOCKS, max_model_len=100 * POOL_TOKENS) as world:
        prompt = world.placeholders.ids(POOL_TOKENS - 20)
        outcomes = await asyncio.gather(
            world.send(_chat_to_the_end(world)), world.send(_completion(prompt, max_tokens=20))
        )
        assert [outcome.finish_reason for outcome in outcomes] == ["length", "length"]
        assert outcomes[1].text == world.decoded(world.output(prompt, 20))
        chat_usage = outcomes[0].usage
        assert chat_usage["total_tokens"] == POOL_TOKENS


def _chat_to_the_end(world: World) -> Call:
    """A chat that says nothing about its length."""
    request = {"method": "POST", "path": "/v1/chat/completions", "body": {"model": MODEL}}
    return call_of(request, messages=[{"role": "user", "content": world.placeholders.text(20, seed="chat")}])


NEEDLES = 3
NEEDLE_TOKENS = 20 * 16
NUM_RANDOM = 500
ROUNDS = 10


async def test_rw_124_needles_in_a_pool_that_churns(valkey: Server) -> None:
    """Every needle's answer, log probabilities included, is the one it had in an empty cache."""
    random = seeded("needles")
    async with open_world(valkey, num_blocks=64, max_model_len=512) as world:
        needles = [_random_ids(random, NEEDLE_TOKENS, world) for _ in range(NEEDLES)]
        calls = [_completion(needle, max_tokens=8, logprobs=3) for needle in needles]
        cold = [_told(await world.send(call)) for call in calls]
        for needle, answer in zip(needles, cold, strict=True):
            assert answer["text"] == world.decoded(world.output(needle, 8))
        num_cached = 0
        for _ in range(ROUNDS):
            churn = [_churn(world, random, needles) for _ in range(NUM_RANDOM // ROUNDS)]
            asked = await asyncio.gather(*(world.send(call) for call in calls), *churn)
            answers = [outcome for outcome in asked[:NEEDLES] if outcome is not None]
            assert [_told(outcome) for outcome in answers] == cold
            num_cached += sum(outcome.cached_tokens for outcome in answers)
        assert num_cached > 0, "some blocks survived, so that reuse was tried at all"
        await eventually(lambda: world.num_running == 0)


def _told(outcome: Outcome) -> dict[str, Any]:
    choice: dict[str, Any] = outcome.body["choices"][0]
    assert choice["logprobs"]["token_logprobs"], "log probabilities were asked for"
    return choice


async def _churn(world: World, random: Random, needles: Sequence[Sequence[int]]) -> Outcome | None:
    """One random prompt, sometimes with a needle's beginning, sometimes left by its client."""
    start = random.choice(needles)[: random.randrange(NEEDLE_TOKENS)] if random.random() < 0.2 else []
    prompt = [*start, *_random_ids(random, random.randrange(1, 150), world)]
    call = _completion(prompt, max_tokens=random.randrange(1, 12), stream=random.random() < 0.5)
    if random.random() < 0.8:
        outcome = await world.send(call)
        assert outcome.status == 200
        return outcome
    asking = asyncio.create_task(world.send(call))
    await asyncio.sleep(random.random() * 0.05)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return None


def _random_ids(random: Random, count: int, world: World) -> list[int]:
    return [random.randrange(RESERVED, world.renderer.vocab_size) for _ in range(count)]
