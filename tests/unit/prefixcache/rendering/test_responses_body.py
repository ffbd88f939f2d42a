"""A body of the Responses API is the chat that an engine makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.canonical import canonical_chat
from prefixcache.rendering.chat_body import chat_form
from prefixcache.rendering.responses_body import responses_form


def assert_same(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert canonical_chat(responses_form(body)) == canonical_chat(chat_form(chat))


@pytest.mark.parametrize(
    "asked",
    [
        "Hi",
        [{"role": "user", "content": "Hi"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "id": "i"}],
    ],
)
def test_input_as_text_or_items(asked: Any) -> None:
    assert_same(
        {"instructions": "Be brief.", "input": asked, "max_output_tokens": 5, "store": False},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    )


def test_items_of_the_assistant_in_a_row_are_one_message() -> None:
    items = [
        {"role": "user", "content": "Oslo?"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "look"}]},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Wait", "annotations": []}],
        },
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": "ls"},
        {"type": "function_call_output", "call_id": "c1", "output": "-3"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "a b"}]},
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "Thanks"},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
        {"id": "c2", "type": "function", "function": {"name": "shell", "arguments": {"input": "ls"}}},
    ]
    tool = {"name": "weather", "parameters": {"type": "object"}}
    assert_same(
        {"input": items, "tools": [{"type": "function", **tool}, {"type": "web_search"}]},
        {
            "tools": [{"type": "function", "function": tool}, {"type": "web_search"}],
            "messages": [
                {"role": "user", "content": "Oslo?"},
                {"role": "assistant", "content": "Wait", "reasoning": "look", "tool_calls": calls},
                {"role": "tool", "tool_call_id": "c1", "content": "-3"},
                {"role": "tool", "tool_call_id": "c2", "content": "a b"},
                {"role": "assistant", "content": "Cold."},
                {"role": "user", "content": "Thanks"},
            ],
        },
    )


def test_a_second_answer_begins_a_second_message() -> None:
    form = responses_form(
        {
            "input": [
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}]},
            ]
        }
    )
    assert [(message.parts[0].value, message.reasoning) for message in form.messages[:2]] == [("a", None), ("b", "c")]
    assert form.messages[2].reasoning == "d"


def test_an_item_that_nobody_knows_makes_a_difference() -> None:
    forms = [
        canonical_chat(responses_form({"input": [{"type": "item_reference", "id": "i", "of": of}]})) for of in "ab"
    ]
    assert forms[0] != forms[1]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": None},
        {"input": 5},
        {"input": [5]},
        {"input": [{}]},
        {"input": [{"type": 5}]},
        {"input": [{"role": "user", "content": 5}]},
        {"input": "Hi", "instructions": 5},
        {"input": "Hi", "tools": 5},
        {"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]},
    ],
)
def test_odd_bodies_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        responses_form(body)
