"""Usage as each API spells it, from streams in any cut and from whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.usage import Usage, usage_in
from proxy.engines.usage_reader import StreamUsage, WholeUsage, event_data
from tests.support.answer_bytes import chat_events, event, usage
from tests.support.cuts import cut

CHAT = Usage(prompt_tokens=100, cached_tokens=64, completion_tokens=7)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"usage": usage(100, 7, 64)}, CHAT),
        ({"usage": usage(100, 7)}, Usage(prompt_tokens=100, completion_tokens=7)),
        ({"usage": usage(100, 7, 0)}, Usage(prompt_tokens=100, cached_tokens=0, completion_tokens=7)),
        ({"usage": {**usage(1, 1), "prompt_tokens_details": {}}}, Usage(prompt_tokens=1, completion_tokens=1)),
        (
            {"usage": {**usage(1, 1), "prompt_tokens_details": {"cached_tokens": None}}},
            Usage(prompt_tokens=1, completion_tokens=1),
        ),
        ({"usage": None}, None),
        ({"choices": []}, None),
        (
            {"usage": {"input_tokens": 36, "output_tokens": 7, "cache_read_input_tokens": 64}},
            Usage(prompt_tokens=100, cached_tokens=64, completion_tokens=7),
        ),
        (
            {"usage": {"input_tokens": 100, "output_tokens": 7, "cache_read_input_tokens": None}},
            Usage(prompt_tokens=100, completion_tokens=7),
        ),
        (
            {
                "type": "message_start",
                "message": {
                    "usage": {"input_tokens": 3, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 97}
                },
            },
            Usage(prompt_tokens=100, cached_tokens=0),
        ),
        ({"type": "message_delta", "usage": {"output_tokens": 7}}, Usage(completion_tokens=7)),
        (
            {
                "type": "response.completed",
                "response": {
                    "usage": {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 64}}
                },
            },
            CHAT,
        ),
        ({"usage": {"prompt_tokens": "100", "completion_tokens": -1}}, Usage()),
        ({"usage": {"prompt_tokens": True, "completion_tokens": 2.5}}, Usage()),
        ({"usage": [1]}, None),
        ([{"usage": usage(1, 1)}], None),
    ],
)
def test_every_spelling(told: Any, expected: Usage | None) -> None:
    assert usage_in(json.dumps(told).encode()) == expected


@pytest.mark.parametrize("data", [b"", b"[DONE]", b'{"usage": {', b'{"usage":' + b"[" * 100_000, b"\xff"])
def test_what_is_no_answer_has_no_usage(data: bytes) -> None:
    assert usage_in(data) is None


def test_later_words_add_to_earlier_ones() -> None:
    reader = StreamUsage()
    start = {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 36, "cache_read_input_tokens": 64, "output_tokens": 1}},
    }
    reader.feed(event(start))
    reader.feed(event({"type": "message_delta", "usage": {"output_tokens": 9}}))
    assert reader.usage == Usage(prompt_tokens=100, cached_tokens=64, completion_tokens=9)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_a_stream_in_any_cut_is_passed_as_it_is(line_end: bytes, data: st.DataObject) -> None:
    stream = b"".join(chat_events(["Grüße", '"usage"', "🙂"], usage=usage(100, 7, 64), line_end=line_end))
    reader = StreamUsage()
    parts = cut(stream, data)
    assert [reader.feed(part) for part in parts] == parts
    assert reader.end() == b""
    assert reader.usage == CHAT
    assert reader.is_between_events


def test_an_event_of_600_kb_and_one_over_the_limit() -> None:
    long = {"choices": [{"delta": {"content": "x" * 600_000}}], "usage": usage(100, 7, 64)}
    for most, expected in ((8 * 1024 * 1024, CHAT), (100_000, Usage())):
        reader = StreamUsage(most)
        data = event(long)
        for begin in range(0, len(data), 65_536):
            reader.feed(data[begin : begin + 65_536])
        assert reader.usage == expected
    reader.feed(event({"usage": usage(3, 1)}))
    assert reader.usage == Usage(prompt_tokens=3, completion_tokens=1), "what comes after it is read again"


def test_an_event_that_is_not_complete_counts_for_nothing() -> None:
    reader = StreamUsage()
    reader.feed(b'data: {"usage": {"prompt_tokens": 5}}\n')
    assert not reader.is_between_events
    reader.end()
    assert reader.usage == Usage()


@pytest.mark.parametrize(
    ("lines", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\r\n\r\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b": ping\n\n", b""),
        (b"event: x\ndata: a\nid: 3\ndata: b\n\n", b"a\nb"),
        (b"data: a\rdata\rdata: c\r\r", b"a\n\nc"),
        (b"database: a\nx data: b\n\n", b""),
    ],
)
def test_data_of_an_event(lines: bytes, data: bytes) -> None:
    assert event_data(lines) == data


def test_an_event_whose_json_stands_on_several_lines() -> None:
    reader = StreamUsage()
    reader.feed(b'data: {"usage":\ndata: {"prompt_tokens": 5}}\n\n')
    assert reader.usage.prompt_tokens == 5


@given(data=st.data())
def test_a_whole_answer_in_any_cut(data: st.DataObject) -> None:
    body = json.dumps({"choices": [], "usage": usage(100, 7, 64)}).encode()
    reader = WholeUsage()
    parts = cut(body, data)
    assert [reader.feed(part) for part in parts] == parts
    assert reader.usage == Usage(), "not before its end"
    reader.end()
    assert reader.usage == CHAT


def test_a_whole_answer_over_the_limit_is_given_up_for_good() -> None:
    reader = WholeUsage(most_bytes=10)
    reader.feed(b'{"usage":  ')
    reader.feed(b'{"prompt_tokens": 1}}')
    reader.end()
    assert reader.usage == Usage()
