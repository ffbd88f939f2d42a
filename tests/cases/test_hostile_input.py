"""Class hostile-input: what is wrong is refused by its name, at once, and nobody else notices."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from tests.cases.catalogue import CASES, Call, changed
from tests.cases.outcome import Outcome
from tests.cases.world import MODEL, World, open_world
from tests.support.valkey import Server
from tests.support.waiting import eventually

NAMED_IN_090 = ("prompt", "prompt", "prompt", "logit_bias", "logit_bias", "stop_token_ids", "prompt", "prompt")
"""The field at fault in each variant of the case."""

STREAM_TOKENS = 60


async def test_rw_090_token_ids_that_no_model_has(valkey: Server) -> None:
    async with open_world(valkey, step_delay_s=0.02) as world:
        (worker,) = world.workers
        incarnation = worker.record.incarnation
        normal = asyncio.create_task(world.send(_normal_stream()))
        await eventually(lambda: world.num_running == 1)
        outcomes = await world.play("RW-090")
        assert not normal.done(), "the stream ran beside every one of them"
        for outcome, field in zip(outcomes, NAMED_IN_090, strict=True):
            assert outcome.status == 400
            named = f"{outcome.error['param']} {outcome.error['message']}"
            assert re.search(rf"\b{field}\b", named), named
        streamed = await normal
        assert streamed.text == world.decoded(world.output(world.prompts[0], STREAM_TOKENS))
        assert len(world.prompts) == 1, "none of them reached a worker"
        assert worker.engine.failure is None and worker.record.incarnation == incarnation


def _normal_stream() -> Call:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True, "temperature": 0}
    return changed(Call(method="POST", path="/v1/chat/completions", content=b"{}"), **body, max_tokens=STREAM_TOKENS)


HALF = r"\ud83c"
PLACES_092 = {
    "content": '"messages":[{"role":"user","content":"cut here: X tail"}]',
    "part": '"messages":[{"role":"user","content":[{"type":"text","text":"X"}]}]',
    "tool description": (
        '"messages":[{"role":"user","content":"x"}],'
        '"tools":[{"type":"function","function":{"name":"f","description":"X","parameters":{}}}]'
    ),
    "cache_salt": '"messages":[{"role":"user","content":"x"}],"cache_salt":"X"',
    "stop": '"messages":[{"role":"user","content":"x"}],"stop":["X"]',
    "metadata": '"messages":[{"role":"user","content":"x"}],"metadata":{"a":"X"}',
}


@pytest.mark.parametrize("place", ["as given", "model", *PLACES_092])
@pytest.mark.parametrize("stream", [True, False])
async def test_rw_092_an_unpaired_surrogate(valkey: Server, place: str, stream: bool) -> None:
    async with open_world(valkey) as world:
        refused = await _send_raw(world, _raw_body(world, place, stream, HALF))
        assert refused.status == 400
        assert refused.error["type"] == "invalid_request_error"
        assert refused.error["param"] or re.search(r"byte \d+", refused.error["message"]), "it says where"
        assert not re.search("codec|Traceback|Error", refused.error["message"]), "no exception's text"
        assert world.prompts == []
        after = await world.send(changed(_normal_stream(), max_tokens=1))
        assert after.status == 200


def _raw_body(world: World, place: str, stream: bool, inserted: str) -> bytes:
    if place == "as given":
        raw = world.calls("RW-092")[0].content.decode()
        assert HALF in raw
        return raw.replace(HALF, inserted).replace('"stream":true', f'"stream":{str(stream).lower()}').encode()
    model, fields = (inserted, PLACES_092["content"]) if place == "model" else (MODEL, PLACES_092[place])
    return f'{{"model":"{model}",{fields.replace("X", inserted)},"stream":{str(stream).lower()}}}'.encode()


async def _send_raw(world: World, content: bytes) -> Outcome:
    return await world.send(Call(method="POST", path=CASES["RW-092"].attempt["path"], content=content))


@pytest.mark.parametrize("place", ["as given", "part", "cache_salt", "stop", "metadata"])
async def test_rw_092_a_paired_escape(valkey: Server, place: str) -> None:
    async with open_world(valkey) as world:
        content = _raw_body(world, place, True, r"\ud83c\udf88").replace(b'"stream"', b'"max_tokens":3,"stream"')
        assert (await _send_raw(world, content)).status == 200
        if place in ("as given", "part"):
            balloon = "\N{BALLOON}".encode()
            assert balloon in world.decoded(world.prompts[0]).encode()


MOST_S = 1.0
"""A template that runs takes minutes."""


async def test_rw_095_templates_and_reserved_names_of_the_caller(valkey: Server) -> None:
    async with open_world(valkey) as world:
        calls = world.calls("RW-095")
        watching = asyncio.create_task(_slowest_health(world))
        for call in calls:
            began = time.monotonic()
            refused = await world.send(call)
            assert time.monotonic() - began < MOST_S
            assert refused.status == 400
            assert refused.error["param"].partition(".")[0] in ("chat_template", "chat_template_kwargs")
        watching.cancel()
        assert world.prompts == []
        assert await watching < MOST_S


async def _slowest_health(world: World) -> float:
    """Seconds of the slowest answer until this is cancelled."""
    slowest = 0.0
    try:
        while True:
            began = time.monotonic()
            assert (await world.proxy.client.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        return slowest


CONTEXT = 128
_SIZES = {"ctx+1": CONTEXT + 1, "ctx": CONTEXT, "ctx-1": CONTEXT - 1, "ctx-10": CONTEXT - 10}
VARIANTS_099 = CASES["RW-099"].attempt["vary"]
EXPECTED_099 = (None, None, None, 1, 10)
"""Completion tokens of each variant; None where it must be refused."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("variant", "completion"), list(zip(VARIANTS_099, EXPECTED_099, strict=True)))
async def test_rw_099_the_end_of_the_context(
    valkey: Server, variant: dict[str, Any], completion: int | None, stream: bool
) -> None:
    async with open_world(valkey, max_model_len=CONTEXT) as world:
        num_tokens = _SIZES[variant["N"]]
        limits = {"max_tokens": variant["max_tokens"]} if isinstance(variant.get("max_tokens"), int) else {}
        messages = [{"role": "user", "content": _content_of_prompt(world, num_tokens)}]
        base = CASES["RW-099"].attempt["base"]
        call = Call(method=base["method"], path=base["path"], content=b"{}")
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        call = changed(call, model=MODEL, messages=messages, temperature=0, stream=stream, **limits, **usage)
        outcome = await world.send(call)
        if completion is None:
            assert (outcome.status, outcome.error["code"]) == (400, "context_length_exceeded")
            for number in (CONTEXT, num_tokens):
                assert str(number) in outcome.error["message"]
            assert world.prompts == []
        else:
            assert outcome.finish_reason == "length"
            assert outcome.usage["prompt_tokens"] == num_tokens == len(world.prompts[0])
            assert outcome.usage["completion_tokens"] == completion
        assert (await world.send(changed(_normal_stream(), max_tokens=1))).status == 200


def _content_of_prompt(world: World, num_tokens: int) -> str:
    """A text that makes a prompt of exactly so many tokens: each x is one."""

    def prompt_tokens(content: str) -> int:
        return len(world.renderer.encode(world.renderer.render([{"role": "user", "content": content}])))

    content = "x" * (num_tokens - prompt_tokens("x") + 1)
    assert prompt_tokens(content) == num_tokens
    return content
