"""Class wire-shape: typed clients can read every chunk, and no field is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from prefixcache.protocol import Sampling
from tests.cases.catalogue import CASES, Call, Placeholders, calls, changed, without
from tests.cases.world import MODEL, World, open_world
from tests.support.engine_proxy import engine_answers, engine_proxy
from tests.support.valkey import Server

APPLIED: Mapping[str, Any] = {
    "top_k": 7,
    "min_p": 0.05,
    "seed": 11,
    "logit_bias": {5: -1.0},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.05,
}
"""Field of the case -> its value at the worker."""

WITHOUT_EFFECT = {"metadata", "store", "user", "parallel_tool_calls"}
"""They ask for nothing that changes the answer."""

REFUSED = {"chat_template_kwargs", "guided_json", "response_format", "x_vendor_field"}

BASE_FIELDS = {"model", "messages", "max_tokens"}


async def test_rw_082_the_shape_of_a_stream(valkey: Server) -> None:
    async with open_world(valkey) as world:
        outcome = await world.send(without(world.calls("RW-082")[0], "tools", "tool_choice"))
        first, *others = [chunk["choices"][0] for chunk in outcome.chunks]
        assert first["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in others)
        assert {choice["index"] for choice in (first, *others)} == {0}
        assert all("tool_calls" not in choice["delta"] for choice in (first, *others))
        assert [choice["finish_reason"] for choice in others[:-1]] == [None] * (len(others) - 1)
        assert others[-1]["finish_reason"] == "length"
        constant = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in outcome.chunks}
        assert len(constant) == 1


async def test_rw_082_tools_are_refused_by_name(valkey: Server) -> None:
    """Calls cannot be parsed out of an answer here, so a request that offers tools is not answered without them."""
    async with open_world(valkey) as world:
        (outcome,) = await world.play("RW-082")
        assert (outcome.status, outcome.error["param"]) == (400, "tools")
        assert world.prompts == []


def _alone(call: Call, field: str) -> Call:
    """The request with one field of the case besides the necessary ones."""
    return without(call, *(set(call.body) - BASE_FIELDS - {field}))


@pytest.mark.parametrize("field", sorted(APPLIED))
async def test_rw_084_a_field_that_is_applied(valkey: Server, field: str) -> None:
    async with open_world(valkey) as world:
        outcome = await world.send(_alone(world.calls("RW-084")[0], field))
        assert outcome.status == 200, outcome.content
        assert getattr(_sampling(world), field) == APPLIED[field]


def _sampling(world: World) -> Sampling:
    (worker,) = world.workers
    (sampling,) = {
        id(share.sample): share.sample.sampling for share in worker.runner.steps[-1] if share.sample
    }.values()
    return sampling


@pytest.mark.parametrize("field", sorted(WITHOUT_EFFECT))
async def test_rw_084_a_field_without_effect(valkey: Server, field: str) -> None:
    async with open_world(valkey) as world:
        (call,) = world.calls("RW-084")
        plain = await world.send(changed(_alone(call, ""), temperature=0))
        outcome = await world.send(changed(_alone(call, field), temperature=0))
        assert outcome.text == plain.text
        assert world.prompts[0] == world.prompts[1]


@pytest.mark.parametrize("field", sorted(REFUSED))
async def test_rw_084_a_field_that_cannot_be_honoured(valkey: Server, field: str) -> None:
    async with open_world(valkey) as world:
        outcome = await world.send(_alone(world.calls("RW-084")[0], field))
        assert (outcome.status, outcome.error["param"]) == (400, field)
        assert field in outcome.error["message"]
        assert world.prompts == []


async def test_rw_084_all_fields_at_once(valkey: Server) -> None:
    async with open_world(valkey) as world:
        (outcome,) = await world.play("RW-084")
        assert outcome.status == 400
        assert outcome.error["param"] in REFUSED


async def test_rw_084_an_engine_gets_the_body_as_it_is() -> None:
    """Byte for byte, so that no number is written in another way; a stream is asked for its usage besides."""
    (call,) = calls("RW-084", Placeholders(model=MODEL))
    content = call.content.replace(b"0.05", b"5.0e-2")
    async with engine_proxy(engine_answers(MODEL)) as fleet:
        await fleet.client.post(call.path, content=content)
        streamed = content[:-1] + b', "stream": true}'
        await fleet.client.post(call.path, content=streamed)
        whole, asked_for_usage = [request.body for request in fleet.asked()]
        assert whole == content
        assert asked_for_usage == b'{"stream_options":{"include_usage":true},' + streamed[1:]


def test_rw_084_every_field_of_the_case_is_looked_at() -> None:
    fields = set(CASES["RW-084"].attempt["request"]["body"])
    assert fields == BASE_FIELDS | APPLIED.keys() | WITHOUT_EFFECT | REFUSED
