"""What an engine answered is expected there of the next turn, by every proxy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from proxy.app import ENGINES
from proxy.engines import answer_claims
from proxy.engines.engine_settings import EngineSettings
from tests.support.answer_bytes import chat_answer, chat_chunk, chat_stream, chunked, event, stream_head
from tests.support.engine_proxy import chat, engine_answers, engine_proxy
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import running_proxy
from tests.support.scripted_engine import ReceivedRequest, Step
from tests.support.waiting import eventually

QUESTION = "tell me more about it. " * 40
ANSWER = "there is not much more to tell. " * 60


def _answers(request: ReceivedRequest) -> Sequence[Step]:
    """In one piece or as a stream."""
    if b'"stream":true' in request.body:
        return (chat_stream([ANSWER[at : at + 7] for at in range(0, len(ANSWER), 7)]),)
    return (chat_answer(ANSWER),)


def _calls_a_tool(request: ReceivedRequest) -> Sequence[Step]:
    pieces = [
        chat_chunk({"role": "assistant", "content": ANSWER}),
        chat_chunk({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}]}),
        chat_chunk({}, finish_reason="tool_calls"),
    ]
    return (stream_head() + chunked([*map(event, pieces), event("[DONE]")]),)


def _next_turn(answer: str = ANSWER) -> list[dict[str, Any]]:
    return [*chat(QUESTION)["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": "and?"}]


def _hit_tokens(answer: httpx.Response) -> int:
    return int(answer.headers["x-prefixcache-hit-tokens"])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_is_expected_to_find_the_answer_by_every_proxy(stream: bool) -> None:
    store = MemoryStore()
    async with engine_proxy(engine_answers(then=_answers), store=store) as first:
        engines = EngineSettings(urls=[engine.url for engine in first.engines])
        async with running_proxy(store, engines=engines) as second:
            await eventually(lambda: second.app[ENGINES].num_up == 1)
            answer = await first.chat(QUESTION, stream=stream)
            assert answer.status_code == 200
            link = first.fleet.links[0]
            num_bytes = len(QUESTION) + len(ANSWER)
            await eventually(lambda: link.num_claims == num_bytes // 256)
            again = await second.client.post("/v1/chat/completions", json=chat(messages=_next_turn(), max_tokens=1))
            assert _hit_tokens(again) > (len(QUESTION) + 0.9 * len(ANSWER)) / 4
            other = await second.client.post("/v1/chat/completions", json=chat(messages=_next_turn("no"), max_tokens=1))
            assert _hit_tokens(other) < len(QUESTION) / 4


@pytest.mark.parametrize("why", ["calls a tool", "large"])
async def test_an_answer_that_is_not_claimed_is_not_expected(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_proxy(engine_answers(then=_answers if why == "large" else _calls_a_tool)) as proxy:
        if why == "large":
            monkeypatch.setattr(answer_claims, "LARGE_BODY_BYTES", len(QUESTION))
        await proxy.chat(QUESTION, stream=True)
        # Answers are claimed in the order of their ends: after this one the first has had its turn.
        proxy.engines[0].answer = engine_answers(then=_answers)
        await proxy.chat("another " * 40)
        num_others = (len("another " * 40) + len(ANSWER)) // 256
        await eventually(lambda: proxy.fleet.links[0].num_claims == len(QUESTION) // 256 + num_others)
        assert _hit_tokens(await proxy.chat(messages=_next_turn())) <= len(QUESTION) / 4
