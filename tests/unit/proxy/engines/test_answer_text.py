"""The text of answers as engines send them, in any cut; and the answers whose text is not what the next turn has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.answer_text import KeptAnswer
from proxy.engines.usage_reader import StreamUsage, WholeUsage
from proxy.engines.usage_request import UsageFilter
from tests.support.cuts import cut

TEXT = "two words,\n\ndata: [DONE] and \U0001f30d"


def event(choice: dict[str, Any], end: str = "\n\n") -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}{end}"


def said(text: str | None, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"delta": {"content": text, **fields}, "finish_reason": finish_reason}


def stream(*choices: dict[str, Any], end: str = "\n\n") -> bytes:
    usage = f'data: {{"choices":[],"usage":{{"prompt_tokens":3}}}}{end}'
    return "".join([*(event(choice, end) for choice in choices), usage, f"data: [DONE]{end}"]).encode()


def text_of(*pieces: bytes, is_stream: bool = True, **limits: Any) -> str | None:
    kept = KeptAnswer(StreamUsage() if is_stream else WholeUsage(), is_stream=is_stream, **limits)
    assert b"".join(kept.feed(piece) for piece in pieces) + kept.end() == b"".join(pieces)
    return kept.text()


@given(st.data(), st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"]))
def test_a_stream_in_any_cut(data: st.DataObject, end: str) -> None:
    parts = [said("", role="assistant"), *map(said, TEXT), said(None, "stop")]
    assert text_of(*cut(stream(*parts, end=end), data)) == TEXT


def test_events_that_are_written_another_way() -> None:
    finish = event(said(None, "stop")).replace("data: ", "data:").replace('"choices": ', '"choices":\ndata:')
    assert text_of(f": ping\n\nevent: x\n{event(said('a'))}\n\n{finish}data: [DONE]\n\n".encode()) == "a"


def test_a_whole_answer() -> None:
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "length"}]}
    assert text_of(json.dumps(answer).encode(), is_stream=False) == TEXT


@pytest.mark.parametrize(
    "choices",
    [
        [said("a")],
        [said("a"), said(None, "tool_calls")],
        [said("a", tool_calls=[{"index": 0}]), said(None, "stop")],
        [said("a", function_call={"name": "f"}), said(None, "stop")],
        [said(None, reasoning_content="hm"), said("a", "stop")],
        [said(None, reasoning="hm"), said("a", "stop")],
        [said(None, refusal="no"), said(None, "stop")],
        [said("a", "stop"), {**said("b", "stop"), "index": 1}],
        [said("a", "content_filter")],
        [{"delta": {"content": ["a"]}, "finish_reason": "stop"}],
    ],
    ids=lambda choices: json.dumps(choices)[:60],
)
def test_what_the_next_turn_would_have_another_way_is_no_text(choices: list[dict[str, Any]]) -> None:
    assert text_of(stream(*choices)) is None


def test_what_is_no_json_is_no_text() -> None:
    assert text_of(b"data: {\n\n" + stream(said("a", "stop"))) is None
    assert text_of(b'{"choices"', is_stream=False) is None


def test_a_long_answer_is_not_kept() -> None:
    whole = stream(said("a"), said("b", "stop"))
    assert text_of(whole, most_bytes=len(whole)) == "ab"
    assert text_of(whole, most_bytes=len(whole) - 1) is None
    kept = KeptAnswer(StreamUsage(), is_stream=True, most_bytes=10)
    for _ in range(3):
        kept.feed(b"123456")
    assert not kept._parts


def test_the_reader_behind_it_has_its_say() -> None:
    kept = KeptAnswer(UsageFilter(), is_stream=True)
    assert kept.may_change
    passed = kept.feed(stream(said("a", "stop")))
    assert b"prompt_tokens" not in passed
    assert kept.usage.prompt_tokens == 3
    assert kept.is_between_events
    assert kept.text() == "a"
