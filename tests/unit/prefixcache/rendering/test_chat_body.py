"""What of a chat completion's body decides on the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.chat_body import chat_form

USER = {"role": "user", "content": "Hi"}


def test_the_plain_case() -> None:
    form = chat_form({"messages": [USER]})
    assert form.add_generation_prompt
    assert not form.continue_final_message
    assert not form.add_special_tokens
    assert form.tools is form.documents is None
    assert form.template_arguments == {}


def test_template_fields() -> None:
    form = chat_form(
        {
            "messages": [USER],
            "tools": [{"type": "function"}],
            "tool_choice": "none",
            "documents": [{"text": "d"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "add_special_tokens": True,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert form.tools == [{"type": "function"}]
    assert form.documents == [{"text": "d"}]
    assert not form.add_generation_prompt
    assert form.continue_final_message
    assert form.add_special_tokens
    assert form.template_arguments == {"enable_thinking": False, "reasoning_effort": "low"}


def test_arguments_may_set_the_fields_that_the_body_leaves_open() -> None:
    arguments = {"add_generation_prompt": False, "documents": [{"text": "d"}], "x": 1}
    form = chat_form({"messages": [USER], "chat_template_kwargs": arguments})
    assert not form.add_generation_prompt
    assert form.documents == [{"text": "d"}]
    assert form.template_arguments == {"x": 1}
    assert chat_form(
        {"messages": [USER], "chat_template_kwargs": arguments, "add_generation_prompt": True}
    ).add_generation_prompt
    assert "documents" in arguments


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_each_of_its_names(name: str) -> None:
    [message] = chat_form({"messages": [{"role": "assistant", "content": "a", name: "b"}]}).messages
    assert message.reasoning == "b"
    assert message.others == {}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None},
        {"messages": {}},
        {"messages": ["Hi"]},
        {"messages": [{}]},
        {"messages": [{"role": 5}]},
        {"messages": [{**USER, "content": 5}]},
        {"messages": [{**USER, "name": 5}]},
        {"messages": [{**USER, "tool_call_id": 5}]},
        {"messages": [{**USER, "tool_calls": 5}]},
        {"messages": [{**USER, "tool_calls": [5]}]},
        {"messages": [USER], "tools": {}},
        {"messages": [USER], "documents": "d"},
        {"messages": [USER], "chat_template_kwargs": []},
        {"messages": [USER], "chat_template": "{{ messages }}"},
    ],
)
def test_odd_bodies_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        chat_form(body)
