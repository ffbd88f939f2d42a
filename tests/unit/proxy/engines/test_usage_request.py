"""Usage is asked for and taken out again, and nothing else of either direction changes."""

from __future__ import annotations

import json
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.json_members import members, without
from proxy.engines.usage import Usage
from proxy.engines.usage_request import UsageFilter, asking_for_usage, without_usage
from tests.support.answer_bytes import chat_chunk, chat_events, event, usage
from tests.support.cuts import cut

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
OPTIONS = st.none() | st.dictionaries(
    st.sampled_from(["include_usage", "continuous_usage_stats", "x"]), st.none() | st.booleans() | VALUES, max_size=3
)


@st.composite
def _spelled(draw: st.DrawFn, value: Any) -> str:
    """The value as JSON with blanks and escapes anywhere that JSON allows them."""
    blank = st.text(" \t\r\n", max_size=2)
    if isinstance(value, str) and draw(st.booleans()):
        return '"' + "".join(f"\\u{unit:04x}" for unit in _utf16(value)) + '"'
    if isinstance(value, dict):
        parts = [
            f"{draw(blank)}{draw(_spelled(key))}{draw(blank)}:{draw(blank)}{draw(_spelled(each))}{draw(blank)}"
            for key, each in value.items()
        ]
        return "{" + (",".join(parts) or draw(blank)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(f"{draw(blank)}{draw(_spelled(each))}{draw(blank)}" for each in value) + "]"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


def _utf16(text: str) -> list[int]:
    data = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[place : place + 2], "big") for place in range(0, len(data), 2)]


@given(data=st.data())
def test_any_body_asks_for_usage_and_says_nothing_else_besides(data: st.DataObject) -> None:
    body = data.draw(st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
    body["stream"] = data.draw(st.just(True) | st.booleans() | VALUES)
    if data.draw(st.booleans()):
        body["stream_options"] = data.draw(OPTIONS)
    spelled = (data.draw(st.text(" \n", max_size=2)) + data.draw(_spelled(body))).encode()
    parsed = msgspec.json.decode(spelled)
    asked = _asked(spelled, parsed)
    options = parsed.get("stream_options") or {}
    if parsed["stream"] is not True or options.get("include_usage"):
        assert asked is None
        return
    assert asked is not None
    expected = {**parsed, "stream_options": {**options, "include_usage": True}}
    assert json.loads(asked) == json.loads(json.dumps(expected))
    assert len(asked) <= len(spelled) + len(b'"stream_options":{"include_usage":true},'), "the rest stays byte for byte"


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (b'{"stream":true}', b'{"stream_options":{"include_usage":true},"stream":true}'),
        (b' { "stream" : true }', b' {"stream_options":{"include_usage":true}, "stream" : true }'),
        (b'{"stream":true,"stream_options":null}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream":true,"stream_options":{}}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (
            b'{"stream":true,"stream_options":{"x":[{"include_usage":1}]}}',
            b'{"stream":true,"stream_options":{"include_usage":true,"x":[{"include_usage":1}]}}',
        ),
        (
            b'{"stream":true,"stream_options":{"include_usage" : false , "x":1}}',
            b'{"stream":true,"stream_options":{"include_usage" : true , "x":1}}',
        ),
        (
            b'{"stream_options":{},"stream":true,"stream_options":null}',
            b'{"stream_options":{},"stream":true,"stream_options":{"include_usage":true}}',
        ),
        (b'{"stream":true,"stream_options":"yes"}', None),
        (b'{"stream":true,"stream_options":{"include_usage":true}}', None),
        (b'{"stream":"true"}', None),
        (b"{}", None),
    ],
)
def test_exact_bytes(body: bytes, asked: bytes | None) -> None:
    assert _asked(body, json.loads(body)) == asked


def _asked(body: bytes, parsed: Any) -> bytes | None:
    """The body that an engine gets; None where it gets what came."""
    edit = asking_for_usage(body, parsed)
    if edit is None:
        return None
    changed = b"".join(edit.parts(body))
    assert edit.length(body) == len(changed)
    return changed


def _events(with_usage: bool, extra: dict[str, Any], texts: list[str], line_end: bytes) -> list[bytes]:
    """A stream as an engine writes it when usage was asked for, and when it was not."""
    chunks = [chat_chunk({"content": text}, **extra) for text in texts]
    if with_usage:
        chunks = [{**each, "usage": None} for each in chunks] + [chat_chunk(None, usage=usage(100, 7, 64))]
    return [event(each, line_end=line_end) for each in chunks] + [event("[DONE]", line_end=line_end)]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_any_stream_in_any_cut_is_that_of_an_engine_that_was_not_asked(line_end: bytes, data: st.DataObject) -> None:
    texts = data.draw(
        st.lists(st.sampled_from(["a", "", '"usage":null', '\\"usage', "Grüße 🙂", "\r\n\n"]), max_size=4)
    )
    extra = data.draw(
        st.dictionaries(st.sampled_from(["meta", "usages"]), st.just({"usage": None, "x": "}"}), max_size=2)
    )
    asked = b"".join(_events(True, extra, texts, line_end))
    unasked = b"".join(_events(False, extra, texts, line_end))
    filter = UsageFilter()
    passed = b"".join(filter.feed(part) for part in cut(asked, data)) + filter.end()
    assert passed == unasked
    assert filter.usage == Usage(prompt_tokens=100, cached_tokens=64, completion_tokens=7)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_cut_at_every_single_place_and_at_all_of_them(line_end: bytes) -> None:
    asked, unasked = (b"".join(_events(with_usage, {}, ["a", "b"], line_end)) for with_usage in (True, False))
    cuts = [[asked[:place], asked[place:]] for place in range(len(asked))]
    cuts.append([asked[place : place + 1] for place in range(len(asked))])
    for parts in cuts:
        filter = UsageFilter()
        assert b"".join(map(filter.feed, parts)) + filter.end() == unasked


@given(data=st.data())
def test_a_stream_without_usage_passes_as_it_is(data: st.DataObject) -> None:
    stream = b": ping\r\n\r\n" + b"".join(chat_events(["a", "🙂"])) + b"data: cut off"
    filter = UsageFilter()
    assert b"".join(filter.feed(part) for part in cut(stream, data)) + filter.end() == stream


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'data: {"choices":[1],"usage":null}\n\n', b'data: {"choices":[1]}\n\n'),
        (b'data: {"usage":null,"choices":[1]}\n\n', b'data: {"choices":[1]}\n\n'),
        (b'data: {"a":1 , "usage" : {"x":[1,2]} , "choices":[1]}\n\n', b'data: {"a":1 , "choices":[1]}\n\n'),
        (b'data: {"usage":null}\n\n', b"data: {}\n\n"),
        (b'data: {"usage":null,"choices":[1],"usage":{}}\n\n', b'data: {"choices":[1]}\n\n'),
        (b'event: x\nid: 1\ndata: {"choices":[1],"usage":{}}\n\n', b'event: x\nid: 1\ndata: {"choices":[1]}\n\n'),
        (b'data: {"choices":[],"usage":null}\n\n', b'data: {"choices":[]}\n\n'),
        (b'data: {"choices":[],"usage":{}}\n\n', b""),
        (b'data: {"usage":{}}\n\n', b"data: {}\n\n"),
        (b'data: {"error":{"usage":null}}\n\n', b'data: {"error":{"usage":null}}\n\n'),
        (b'data: {"choices":[1],"x":"usage"}\n\n', b'data: {"choices":[1],"x":"usage"}\n\n'),
        (b'data: "usage"\n\n', b'data: "usage"\n\n'),
        (b'data: {"usage"\n\n', b'data: {"usage"\n\n'),
        (b'data: {"choices":[1],\ndata: "usage":null}\n\n', b'data: {"choices":[1],\ndata: "usage":null}\n\n'),
    ],
)
def test_one_event(before: bytes, after: bytes) -> None:
    assert without_usage(before) == after


def test_an_event_is_passed_when_it_is_whole_and_one_over_the_limit_at_once() -> None:
    filter = UsageFilter(most_event_bytes=30)
    assert filter.feed(b"data: {") == b""
    assert filter.is_between_events, "the client has nothing of it"
    assert filter.feed(b"}\n\nda") == b"data: {}\n\n"
    long = b'ta: {"usage":null,' + b"x" * 40
    assert filter.feed(long) == b"da" + long
    assert not filter.is_between_events
    assert filter.feed(b"}\n\ndata: 1\n\n") == b"}\n\ndata: 1\n\n"


@given(data=st.data())
def test_members_stand_where_they_are_said_to(data: st.DataObject) -> None:
    value = data.draw(st.dictionaries(st.text(string.printable, max_size=5), VALUES, max_size=4))
    spelled = data.draw(_spelled(value)).encode()
    found = list(members(spelled, 0))
    assert {member.key: msgspec.json.decode(spelled[member.value_begin : member.end]) for member in found} == value
    for member in found:
        rest = json.loads(without(spelled, member))
        assert rest == json.loads(json.dumps({key: each for key, each in value.items() if key != member.key}))
