"""The shape in which a chat reaches its template, and what becomes of everything that is not text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.chat_body import chat_form
from prefixcache.rendering.engine_chat import render_chat_form
from prefixcache.rendering.renderer import Renderer
from tests.support.chats import TEMPLATES
from tests.support.tiny_tokenizer import TINY_TEMPLATE, tiny_tokenizer_files

SHOWS_ALL = "{{ [messages, tools, documents, add_generation_prompt, shade or none] | tojson }}"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def renderer(template: str = TINY_TEMPLATE) -> Renderer:
    return Renderer(tiny_tokenizer_files(chat_template=template))


def text(body: dict[str, Any], template: str = TINY_TEMPLATE) -> str:
    return render_chat_form(renderer(template), chat_form(body)).text


def shown(body: dict[str, Any]) -> list[Any]:
    result: list[Any] = json.loads(text(body, SHOWS_ALL))
    return result


def test_a_message_has_only_what_templates_know() -> None:
    message = {"role": "a|ny", "content": None, "name": "n", "tool_call_id": "t", "refusal": "no", "x": 1}
    [[given], *_] = shown({"messages": [message]})
    assert given == {"role": "a|ny", "content": "", "name": "n", "tool_call_id": "t"}


def test_reasoning_stands_under_each_name_that_templates_read() -> None:
    [[given], *_] = shown({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}]})
    assert given["thinking"] == given["reasoning"] == given["reasoning_content"] == "b"


def test_arguments_of_calls_are_objects() -> None:
    bare = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    [[given], *_] = shown({"messages": [{"role": "assistant", "tool_calls": [CALL, bare]}]})
    assert [call["function"]["arguments"] for call in given["tool_calls"]] == [{"a": 1}, {}]


def test_a_template_that_joins_arguments_gets_their_text() -> None:
    joins = "{% for c in messages[-1].tool_calls or [] %}{{ '' + c.function.arguments }}{% endfor %}"
    as_object = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for call in (CALL, as_object):
        assert text({"messages": [{"role": "assistant", "tool_calls": [call]}]}, joins) == '{"a": 1}'


def test_tools_documents_and_arguments() -> None:
    tools = [{"function": {"strict": True, "name": "f"}, "type": "function"}, {"type": "web_search"}]
    _, given, documents, add_generation_prompt, shade = shown(
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": tools,
            "documents": [{"text": "d"}],
            "add_generation_prompt": False,
            "chat_template_kwargs": {"shade": "blue"},
        }
    )
    function = {"name": "f", "strict": True, "description": None, "parameters": None}
    assert given == [{"type": "function", "function": function}]
    assert list(given[0]["function"]) == ["name", "description", "parameters", "strict"]
    assert (documents, add_generation_prompt, shade) == ([{"text": "d"}], False, "blue")


def test_control_spellings_of_the_caller_are_control_tokens() -> None:
    model = renderer()
    prompt = render_chat_form(model, chat_form({"messages": [{"role": "user", "content": "a<|im_end|>b"}]}))
    assert model.encode(prompt).tolist().count(2) == 2


def test_parts_are_joined_where_the_template_wants_text() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in text({"messages": chat}, TEMPLATES["chatml_default_system"])
    assert "user\nab<|im_end|>" in text({"messages": chat})


@pytest.mark.parametrize("template", [TINY_TEMPLATE, TEMPLATES["chatml_default_system"]])
def test_an_image_stands_in_its_place_by_its_digest(template: str) -> None:
    def prompt(url: str, question: str = "what is it?") -> str:
        image = {"type": "image_url", "image_url": {"url": url}}
        parts = [{"type": "text", "text": "See:"}, image, {"type": "text", "text": question}]
        return text({"messages": [{"role": "user", "content": parts}]}, template)

    begin, rest = prompt("data:image/png;base64,AAAA").split("<image ")
    assert begin.rstrip().endswith("See:")
    assert rest.split(">")[1].strip().startswith("what is it?")
    assert prompt("data:image/png;base64,AAAA", "and now?").startswith(f"{begin}<image {rest.split('>')[0]}>")
    assert prompt("data:image/png;base64,AAAB").split("<image ")[1] != rest


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        ("It is ", "<|im_start|>assistant\nIt is "),
        ([{"type": "text", "text": "It"}, {"type": "text", "text": "is "}], "<|im_start|>assistant\nItis "),
    ],
)
def test_the_final_message_is_continued(content: Any, prompt: str) -> None:
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    assert text({"messages": [{"role": "assistant", "content": content}], **flags}) == prompt


def test_a_trimming_template_trims_the_message_that_is_continued() -> None:
    body = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert text(body, TEMPLATES["gemma"]).endswith("<start_of_turn>model\nb")


@pytest.mark.parametrize(
    "body",
    [
        {"continue_final_message": True, "messages": [{"role": "assistant", "content": "a"}]},
        {"continue_final_message": True, "add_generation_prompt": False, "messages": []},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": 5}]},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "a"}], "t": "refuses"},
    ],
)
def test_what_an_engine_refuses_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        text(body, TEMPLATES[body.pop("t", "chatml")])


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    body = {
        "messages": [{"role": "assistant", "content": "a"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    with pytest.raises(InvalidRequest, match="leaves out"):
        text(body, "{{ messages | length }}")
