"""Class text-decoding: streamed text is the one-shot decode, and nothing of a stop string is ever sent."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.cases.catalogue import changed
from tests.cases.outcome import Outcome, send_all
from tests.cases.world import open_world
from tests.support.fake_worker import token_ids
from tests.support.scripted_runner import Script
from tests.support.tiny_tokenizer import TINY_EOS_ID
from tests.support.valkey import Server
from tests.support.waiting import eventually

REPLY = "🐢🎈 早安 👩‍🚀"
WEEKDAYS = " Wednesday, Thursday, Friday, Saturday, Sunday."
REPLACEMENT = "\ufffd"


def _says(ids: Sequence[int]) -> Script:
    """Every answer is `ids` and an end."""
    return lambda _prompt, index: [*ids, TINY_EOS_ID][index]


def _deltas(outcome: Outcome) -> list[str]:
    return [chunk["choices"][0]["delta"].get("content") or "" for chunk in outcome.chunks if chunk["choices"]]


async def test_rw_070_characters_of_several_tokens(valkey: Server) -> None:
    ids = token_ids(REPLY)
    async with open_world(valkey, script=_says(ids)) as world:
        (call,) = world.calls("RW-070")
        streamed, whole = await send_all(world.proxy.client, [call, changed(call, stream=False)])
        assert streamed.text == whole.text == world.decoded(ids) == REPLY
        assert streamed.finish_reason == whole.finish_reason == "stop"
        assert all(REPLACEMENT not in delta for delta in _deltas(streamed))


@pytest.mark.parametrize("num_tokens", range(1, len(token_ids("🐢🎈")) + 1))
async def test_rw_070_cut_by_length(valkey: Server, num_tokens: int) -> None:
    """A character that was begun is flushed once, at the end, as one replacement character; never before."""
    ids = token_ids(REPLY)
    async with open_world(valkey, script=_says(ids)) as world:
        call = changed(world.calls("RW-070")[0], max_tokens=num_tokens)
        streamed, whole = await send_all(world.proxy.client, [call, changed(call, stream=False)])
        expected = world.decoded(ids[:num_tokens])
        assert streamed.text == whole.text == expected
        assert streamed.finish_reason == whole.finish_reason == "length"
        whole_characters = expected.rstrip(REPLACEMENT)
        assert REPLY.startswith(whole_characters) and len(expected) - len(whole_characters) <= 1
        texts = [delta for delta in _deltas(streamed) if delta]
        assert all(REPLACEMENT not in delta for delta in texts[:-1])
        json.loads(whole.content.decode("utf-8", "strict"))


STOPS = {"stream": 0, "whole": 1, "two": 2}
"""Place of each variant in the case."""


@pytest.mark.parametrize("variant", STOPS)
async def test_rw_072_stop_strings_that_span_tokens(valkey: Server, variant: str) -> None:
    async with open_world(valkey, script=_says(token_ids(WEEKDAYS))) as world:
        call = world.calls("RW-072")[STOPS[variant]]
        stop = call.body["stop"]
        first = stop if isinstance(stop, str) else stop[0]
        expected = WEEKDAYS[: WEEKDAYS.index(first)]
        for stream in (True, False):
            (outcome,) = await send_all(world.proxy.client, [changed(call, stream=stream)])
            assert (outcome.text, outcome.finish_reason) == (expected, "stop")
        await eventually(lambda: world.num_running == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_rw_072_what_only_looked_like_a_stop_string_is_released(valkey: Server, stream: bool) -> None:
    """Held back as long as it may become the stop string, then sent in its place, also at the end."""
    async with open_world(valkey, script=_says(token_ids(WEEKDAYS))) as world:
        call = changed(
            world.calls("RW-072")[0], stop=[" Thursday morning", "Sunday. And"], max_tokens=100, stream=stream
        )
        outcome = await world.send(call)
        assert (outcome.text, outcome.finish_reason) == (WEEKDAYS, "stop")
