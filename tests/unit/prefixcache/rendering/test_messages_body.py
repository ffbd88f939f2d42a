"""A body of the Messages API is the chat that an engine makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.canonical import canonical_chat
from prefixcache.rendering.chat_body import chat_form
from prefixcache.rendering.messages_body import messages_form

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def assert_same(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert canonical_chat(messages_form(body)) == canonical_chat(chat_form(chat))


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.",
        [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}}],
        [{"type": "text", "text": "x-anthropic-billing-header: cch=1f3a"}, {"type": "text", "text": "Be brief."}],
    ],
)
def test_system_as_text_or_blocks(system: Any) -> None:
    assert_same(
        {"system": system, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    )


def test_system_messages_come_first() -> None:
    assert_same(
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    )


def test_a_loop_of_tools() -> None:
    tool = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "Oslo?"}, IMAGE]}
    called = [
        {"type": "thinking", "thinking": "I look it up", "signature": "s"},
        {"type": "redacted_thinking", "data": "opaque"},
        {"type": "text", "text": "One moment"},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
    ]
    answered = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "-3"}, IMAGE]},
        {"type": "text", "text": "and tomorrow?", "cache_control": {"type": "ephemeral"}},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    function = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
    assert_same(
        {
            "tools": [{**tool, "cache_control": {"type": "ephemeral"}}],
            "messages": [
                asked,
                {"role": "assistant", "content": called},
                {"role": "user", "content": answered},
            ],
        },
        {
            "tools": [{"type": "function", "function": function}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Oslo?"}, IMAGE_PART]},
                {
                    "role": "assistant",
                    "content": "One moment",
                    "reasoning_content": "I look it up",
                    "tool_calls": [call],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "-3"},
                {"role": "user", "content": [IMAGE_PART]},
                {"role": "user", "content": "and tomorrow?"},
            ],
        },
    )


def test_a_result_alone_leaves_no_empty_message() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "-3"}
    form = messages_form({"messages": [{"role": "user", "content": [result]}]})
    assert [message.role for message in form.messages] == ["tool"]


def test_a_longer_chat_adds_to_a_shorter_one_though_the_cache_mark_moved() -> None:
    def turn(text: str, **marks: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text, **marks}]}

    mark = {"cache_control": {"type": "ephemeral"}}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}
    header = "x-anthropic-billing-header: cch="
    first = {"system": [{"type": "text", "text": header + "1"}], "messages": [turn("Hi", **mark)]}
    second = {
        "system": [{"type": "text", "text": header + "2"}],
        "messages": [turn("Hi"), answer, turn("more", **mark)],
    }
    assert canonical_chat(messages_form(second)).startswith(canonical_chat(messages_form(first)))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "Hi"},
        {"messages": [1]},
        {"messages": [{"content": "Hi"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": 5}]}]},
        {"messages": [], "system": 5},
        {"messages": [], "tools": 5},
        {"messages": [], "tools": [5]},
    ],
)
def test_odd_bodies_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        messages_form(body)
