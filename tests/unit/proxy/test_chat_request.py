"""Validation of chat completion requests: every field, every refusal, and what each refusal names."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, UnsetType

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_MESSAGES
from proxy.chat_request import NO_OPS, ChatFields, ChatRequest, parse_chat_request
from proxy.message_fields import with_joined_parts
from proxy.sampling_fields import GenerationOptions

USER = {"role": "user", "content": "hi"}
OPTIONS = GenerationOptions(model="m")


def parsed(**fields: Any) -> ChatRequest:
    return parse_chat_request(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    return caught.value


def refusal_of_bytes(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(body)
    return caught.value


def test_defaults() -> None:
    assert parsed() == ChatRequest(options=OPTIONS, messages=({"role": "user", "content": "hi"},))


def test_fields_that_change_nothing() -> None:
    assert parsed(user="u", safety_identifier="s", metadata={"k": "v"}, store=False) == parsed()


NULLABLE = sorted(set(ChatFields.__struct_fields__) - {"model", "messages"})


@pytest.mark.parametrize("name", NULLABLE)
def test_null_asks_for_nothing(name: str) -> None:
    assert parsed(**{name: None}) == parsed()


def test_each_raw_field_has_its_no_ops() -> None:
    raw = {name for name, kind in get_type_hints(ChatFields).items() if kind == Raw | UnsetType}
    assert raw - {"metadata"} == set(NO_OPS)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_OPS.items() for value in values])
def test_a_no_op_value_of_a_field_not_honoured_is_accepted(name: str, value: Any) -> None:
    assert parsed(**{name: value}) == parsed()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("service_tier", "flex"),
        ("store", True),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("skip_special_tokens", False),
        ("use_beam_search", True),
        ("length_penalty", 2),
        ("echo", True),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("guided_json", {"type": "object"}),
        ("prompt", "text"),
        ("x" * 5000, 1),
    ],
)
def test_a_field_not_honoured_is_refused_by_name(name: str, value: Any) -> None:
    assert refusal(**{name: value}).param == name[:100]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [USER, 3]}, "messages[1]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
            "messages[1].content[0].cache_control",
        ),
        ({"messages": [{**USER, "weight": 1}]}, "messages[0].weight"),
        ({"messages": [{**USER, "name": 1}]}, "messages[0].name"),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
        ({"messages": [{**USER, "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [{**USER, "refusal": "no"}]}, "messages[0].refusal"),
        ({"messages": [{**USER, "chat_template": "{{ 1 }}"}]}, "messages[0].chat_template"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"safety_identifier": 1}, "safety_identifier"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "custom", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].type",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert error.status == 400
    assert str(error)


def test_messages_are_counted() -> None:
    assert refusal(messages=[USER] * (MAX_MESSAGES + 1)).param == "messages"


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(missing: str) -> None:
    body = {"model": "m", "messages": [USER]}
    del body[missing]
    assert refusal_of_bytes(json.dumps(body).encode()).param == missing


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}]} trailing',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [NaN]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xed\xa0\xbc"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "cut here: \\ud83c tail"}]}',
        b'{"model": "\\ud83c", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "cache_salt": "\\udc00", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "stop": "\\udc00", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "tools": ["\\udc00"], "messages": [{"role": "user", "content": "x"}]}',
        b"[" * 1000 + b"]" * 1000,
        b'{"model": "m", "messages": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"model": "m", "messages": [], "tools": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"model": "m", "messages": [], "tools": ' + b"[" * 100_000,
        b'{"model": "m", "messages": [], "metadata": ' + b'{"a":' * 1000 + b"1" + b"}" * 1001,
        b'{"model": "m", "messages": [], "odd": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "m", "messages": [], "seed": ' + b"9" * 100_000 + b"}",
    ],
)
def test_a_body_that_is_no_sound_json_is_refused_with_a_short_message(body: bytes) -> None:
    assert 0 < len(str(refusal_of_bytes(body))) < 300


def test_paired_surrogate_escapes_are_one_character() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83c\\udf88"}]}'
    assert parse_chat_request(body).messages[0]["content"] == "\N{BALLOON}"


def test_max_completion_tokens_beats_max_tokens() -> None:
    assert parsed(max_tokens=5, max_completion_tokens=9).options.max_tokens == 9
    assert parsed(max_completion_tokens=9).options.max_tokens == 9
    assert parsed(max_tokens=5).options.max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "top_logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities(fields: dict[str, Any], top_logprobs: int | None) -> None:
    assert parsed(**fields).options.sampling.top_logprobs == top_logprobs


def test_developer_is_system_and_text_parts_stay_parts() -> None:
    chat = parsed(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Al"},
        ]
    )
    assert chat.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Al"},
    )
    assert with_joined_parts(chat.messages) == [chat.messages[0], {"role": "user", "content": "a\nb", "name": "Al"}]


def test_a_single_part_is_a_text() -> None:
    chat = parsed(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}])
    assert chat.messages == ({"role": "user", "content": "a"},)


def test_a_tool_loop_reaches_the_template_as_it_is() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    chat = parsed(
        messages=[
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "call_1", "content": "4C"},
        ]
    )
    assert chat.messages[1:] == (
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "4C", "tool_call_id": "call_1"},
    )


@pytest.mark.parametrize("arguments", ["{", '"text"', "[1]", '{"a": NaN}', '{"a": ' + "[" * 10_000, "null"])
def test_arguments_of_a_tool_call_are_a_json_object(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    error = refusal(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert error.param == "messages[1].tool_calls[0].function.arguments"


def test_a_message_as_the_openai_client_gave_it_out_comes_back_in() -> None:
    dumped: dict[str, Any] = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert parsed(messages=[USER, dumped]).messages[1] == {"role": "assistant", "content": "yes"}


@given(st.binary(max_size=200))
def test_any_bytes_give_a_request_or_a_refusal(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat_request(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(ChatFields.__struct_fields__), json_values)
def test_any_value_of_any_field_is_taken_or_refused_by_a_name_that_begins_with_the_field(name: str, value: Any) -> None:
    try:
        parsed(**{name: value})
    except InvalidRequest as error:
        assert error.param is not None and error.param.startswith(name)


@pytest.mark.parametrize("raw", [b"1e999", b'"\xff\xfe"', b'["\xc0\x80"]'])
@pytest.mark.parametrize("name", ["tools", "response_format", "chat_template", "store"])
def test_what_is_no_json_in_a_field_not_honoured_names_the_field(name: str, raw: bytes) -> None:
    text = json.dumps({"model": "m", "messages": [USER], name: "HERE"}).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(text.replace(b'"HERE"', raw))
    assert caught.value.param == name
