"""Class stream-fidelity, played with plain engines whose every byte is written by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

import proxy.engines.engine_handler
from prefixcache.limits import MAX_SSE_EVENT_BYTES
from proxy.engines.http_pool import EngineTimeouts
from tests.cases.catalogue import Call, Placeholders, calls, changed
from tests.cases.official_client import read_to_the_error
from tests.cases.outcome import Outcome, send
from tests.support.answer_bytes import (
    LAST_CHUNK,
    chat_chunk,
    chat_events,
    chunk,
    chunked,
    event,
    json_answer,
    stream_head,
    usage,
)
from tests.support.engine_proxy import EngineProxy, engine_answers, engine_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_engine import (
    ReceivedRequest,
    ScriptedConnection,
    Step,
    close,
    never,
    pieces,
    reset,
)
from tests.support.waiting import eventually

MODEL = "tiny"
PLACEHOLDERS = Placeholders(model=MODEL)
LIMIT_S = 0.3
NUM_CHUNKS_BEFORE = 5
BEFORE = chat_events(["hello"] * NUM_CHUNKS_BEFORE, model=MODEL, finish_reason=None, is_done=False)
SPEECH = "早安 🐢🎈 👩‍🚀 naïve — ok"

FAULTS: dict[str, tuple[Sequence[Step], str]] = {
    "killed": ((reset(),), "engine_fault"),
    "killed, its host says goodbye": ((close(),), "engine_fault"),
    "killed within an event": ((chunk(b'data: {"choices":[{"del'), reset()), "engine_fault"),
    "ends cleanly without [DONE]": ((LAST_CHUNK,), "engine_fault"),
    "stalls": ((never(),), "engine_timeout"),
    "sends garbage": ((b"\x00\x00\x00\x05hello",), "engine_fault"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_rw_060_an_engine_lost_in_the_middle(fault: str) -> None:
    steps, code = FAULTS[fault]
    (call,) = calls("RW-060", PLACEHOLDERS)
    timeouts = EngineTimeouts(gap_s=LIMIT_S)
    async with (
        engine_proxy(engine_answers(MODEL), timeouts=timeouts) as fleet,
        openai.AsyncOpenAI(base_url=fleet.proxy.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        fleet.engines[0].script(stream_head(), chunk(b"".join(BEFORE)), *steps)
        async with asyncio.timeout(LIMIT_S + 5):
            text, reasons, error = await read_to_the_error(client, call.body)
        assert text == "hello" * NUM_CHUNKS_BEFORE
        assert reasons == [None] * len(reasons)
        assert isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError)
        assert error.code == code
        status = {"engine_fault": "502", "engine_timeout": "504"}[code]
        assert fleet.proxy.metric("prefixcache_requests_total", code=status) == 1
        assert fleet.proxy.metric("prefixcache_requests_total", code="200") == 0
        assert fleet.proxy.metric("prefixcache_request_errors_total", code=code) == 1


async def _both_modes(fleet: EngineProxy, call: Call) -> list[Outcome]:
    """The same request whole and streamed."""
    return [await send(fleet.client, changed(call, stream=stream)) for stream in (False, True)]


def _of_case_061(**fields: Any) -> Call:
    return changed(calls("RW-061", PLACEHOLDERS)[0], **{"model": MODEL, **fields})


@pytest.mark.parametrize(
    ("fields", "refusal", "status", "headers"),
    [
        ({"model": "no-such-model"}, None, 404, {}),
        ({"max_tokens": -1}, 400, 400, {}),
        ({"messages": [{"role": "user", "content": PLACEHOLDERS.text(5000, seed="too long")}]}, 400, 400, {}),
        ({}, 429, 429, {"retry-after": "7"}),
        ({}, 500, 500, {}),
        ({}, 503, 503, {"retry-after": "7"}),
    ],
)
async def test_rw_061_refusals_before_the_first_token(
    fields: dict[str, Any], refusal: int | None, status: int, headers: dict[str, str]
) -> None:
    """Those of an engine pass as they are, whatever it says."""
    told = {"error": {"message": "no", "type": "x", "param": None, "code": None}}

    def then(_: ReceivedRequest) -> Sequence[Step]:
        assert refusal is not None, "a model that nobody serves goes nowhere"
        return (json_answer(told, ("retry-after", "7"), status=refusal),)

    async with engine_proxy(engine_answers(MODEL, then=then)) as fleet:
        whole, streamed = await _both_modes(fleet, _of_case_061(**fields))
        assert whole.status == streamed.status == status
        assert whole.error == streamed.error
        assert refusal is None or whole.body == told
        for name, value in headers.items():
            assert whole.headers[name] == streamed.headers[name] == value


async def test_rw_061_no_engine_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.engines.engine_handler, "HELD_DOWN_S", 0.1)
    async with engine_proxy(engine_answers(MODEL), engine_answers(MODEL)) as fleet:
        for engine in fleet.engines:
            engine.stop_listening()
            engine.close_idle()
        await eventually(lambda: not any(engine.connections for engine in fleet.engines))
        for outcome in await _both_modes(fleet, _of_case_061()):
            assert outcome.status in (502, 503) and outcome.error["type"] == "server_error"
            assert int(outcome.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    "steps",
    [(reset(),), (LAST_CHUNK,), (chunk(b": ping\n\n"), close()), (chunk(b": pi"), chunk(b"ng\n\n"), LAST_CHUNK)],
)
async def test_rw_061_no_200_before_a_token(steps: Sequence[Step]) -> None:
    """The engine commits to 200 before it has any, and then fails: nobody else has to."""
    async with engine_proxy(engine_answers(MODEL)) as fleet:
        fleet.engines[0].script(stream_head(), *steps)
        outcome = await send(fleet.client, _of_case_061(stream=True))
        assert (outcome.status, outcome.error["code"]) == (502, "engine_fault")


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
async def test_rw_062_cuts_anywhere(step_bytes: int, is_asked: bool) -> None:
    """One byte a segment, then everything in one: the same text and the same counts."""
    events = chat_events(list(SPEECH), model=MODEL, usage=usage(7, len(SPEECH), 0))
    stream = chunked(events)
    (call,) = calls("RW-062", PLACEHOLDERS)
    async with engine_proxy(engine_answers(MODEL)) as fleet:
        fleet.engines[0].script(stream_head(), pieces(stream, at=range(0, len(stream), step_bytes)))
        outcome = await send(fleet.client, changed(call, stream_options={"include_usage": True}) if is_asked else call)
        assert outcome.text == SPEECH and "\ufffd" not in outcome.text
        assert outcome.content == b"".join(each for each in events if is_asked or b'"usage"' not in each)
        assert fleet.proxy.metric("prefixcache_generation_tokens_total") == len(SPEECH)
        assert fleet.proxy.metric("prefixcache_prompt_tokens_total") == 7


@pytest.mark.parametrize("has_nulls", [False, True])
async def test_rw_064_usage_only_when_asked_for(has_nulls: bool) -> None:
    """An engine that tells usage to who asks for it, and in every other chunk that there is none, or nothing at all."""
    counts = usage(3, 4, 0)

    def then(request: ReceivedRequest) -> Sequence[Step]:
        assert json.loads(request.body)["stream_options"]["include_usage"] is True, "the proxy asks for itself"
        nulls: dict[str, Any] = {"usage": None} if has_nulls else {}
        chunks = [chat_chunk({"content": text}, model=MODEL, **nulls) for text in ("a", "b", "c")]
        chunks += [
            chat_chunk({}, model=MODEL, finish_reason="stop", **nulls),
            chat_chunk(None, model=MODEL, usage=counts),
        ]
        return stream_head(), chunked([*map(event, chunks), event("[DONE]")])

    async with engine_proxy(engine_answers(MODEL, then=then)) as fleet:
        plain, asked = [await send(fleet.client, call) for call in calls("RW-064", PLACEHOLDERS)]
        assert plain.events[-1] == asked.events[-1] == "[DONE]"
        assert all(len(each["choices"]) == 1 and "usage" not in each for each in plain.chunks)
        *others, last = asked.chunks
        assert all(len(each["choices"]) == 1 and each.get("usage") is None for each in others)
        assert (last["choices"], last["usage"]) == ([], counts)
        assert plain.text == asked.text == "abc"


@pytest.mark.parametrize("keepalive", [b"", b": ping\n\n", b":\n\n", b":\r\n"])
async def test_rw_066_a_long_prefill(keepalive: bytes) -> None:
    """Longer than any gap that is allowed later on. An engine's keepalives come before the first event, as they were.

    The proxy makes none of its own, and no byte comes before the first token.
    """
    go, waiting = asyncio.Event(), asyncio.Event()
    events = chat_events(["a", "b"], model=MODEL)

    async def pinging(connection: ScriptedConnection) -> None:
        waiting.set()
        while not go.is_set():
            if keepalive:
                await connection.send(chunk(keepalive))
            await asyncio.sleep(LIMIT_S / 5)

    (call,) = calls("RW-066", PLACEHOLDERS)
    timeouts = EngineTimeouts(gap_s=LIMIT_S)
    async with (
        engine_proxy(engine_answers(MODEL), timeouts=timeouts) as fleet,
        raw_connection(fleet.proxy.port) as connection,
        openai.AsyncOpenAI(base_url=fleet.proxy.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        for _ in range(2):
            fleet.engines[0].script(stream_head(), pinging, chunked(events))
        connection.send(post(call.path, call.content))
        await waiting.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * LIMIT_S):
                await connection.reader.read(1)
        reading = asyncio.create_task(read_to_the_error(client, call.body))
        await eventually(lambda: len(fleet.asked()) == 2)
        go.set()
        status, _ = await connection.head()
        got = b"".join(await connection.chunks())
        assert status == 200 and got.endswith(b"".join(events))
        pings = got.removesuffix(b"".join(events))
        assert pings == keepalive * (len(pings) // max(len(keepalive), 1)) and bool(pings) == bool(keepalive)
        text, _, error = await reading
        assert (text, error) == ("ab", None)


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("num_bytes", [2_000_000, MAX_SSE_EVENT_BYTES + 1])
async def test_rw_068_a_very_large_event(num_bytes: int, is_asked: bool) -> None:
    """There is no cap: beyond MAX_SSE_EVENT_BYTES an event passes unread."""
    large = event(chat_chunk({"content": "x" * num_bytes}, model=MODEL))
    body = large + b"".join(chat_events(["and the end"], model=MODEL))
    (call,) = calls("RW-068", PLACEHOLDERS)
    async with engine_proxy(engine_answers(MODEL)) as fleet:
        fleet.engines[0].script(stream_head(), chunk(body), LAST_CHUNK)
        outcome = await send(fleet.client, changed(call, stream_options={"include_usage": True}) if is_asked else call)
        assert outcome.content == body
        assert outcome.events[-1] == "[DONE]" and outcome.finish_reason == "stop"
        assert fleet.proxy.metric("prefixcache_requests_total", code="200") == 1
