"""Validation of text completion requests: the fields that only they have."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, UnsetType

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_GENERATIONS
from proxy.completion_request import (
    NO_OPS,
    USUAL_MAX_TOKENS,
    CompletionFields,
    CompletionRequest,
    parse_completion_request,
)
from proxy.sampling_fields import GenerationOptions


def parsed(**fields: Any) -> CompletionRequest:
    return parse_completion_request(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    return caught.value


def test_defaults() -> None:
    options = GenerationOptions(model="m", usual_max_tokens=USUAL_MAX_TOKENS)
    assert parsed() == CompletionRequest(options=options, prompts=("hi",))


@pytest.mark.parametrize(
    ("prompt", "prompts", "names"),
    [
        ("text", ("text",), ["prompt"]),
        (["one"], ("one",), ["prompt[0]"]),
        (["one", "two"], ("one", "two"), ["prompt[0]", "prompt[1]"]),
        ([5], ([5],), ["prompt"]),
        ([5, 6, 7], ([5, 6, 7],), ["prompt"]),
        ([[5], [6, 7]], ([5], [6, 7]), ["prompt[0]", "prompt[1]"]),
        ("[1, 2]", ("[1, 2]",), ["prompt"]),
        (["[1]", '"'], ("[1]", '"'), ["prompt[0]", "prompt[1]"]),
    ],
)
def test_the_four_kinds_of_prompt(prompt: Any, prompts: tuple[Any, ...], names: list[str]) -> None:
    asked = parsed(prompt=prompt)
    assert asked.prompts == prompts
    assert [asked.name_of(place) for place in range(len(prompts))] == names


@pytest.mark.parametrize("space", ["", " ", "\n\t ", " " * 1000])
def test_blanks_in_the_body_do_not_change_the_kind(space: str) -> None:
    body = '{"model":"m","prompt":S[S[S1S,S2S]S]S}'.replace("S", space).encode()
    assert parse_completion_request(body).prompts == ([1, 2],)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], 2], "prompt[1]"),
        ([[[1]]], "prompt[0][0]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ([{}], "prompt[0]"),
        (None, "prompt"),
        (3, "prompt"),
        ({"text": "a"}, "prompt"),
        (["a"] * (MAX_GENERATIONS + 1), "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused_by_its_place(prompt: Any, param: str) -> None:
    assert refusal(prompt=prompt).param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([-1], "prompt[0]"),
        ([5, 512], "prompt[1]"),
        ([2**31], "prompt[0]"),
        ([2**63], "prompt[0]"),
        ([int("9" * 4000)], "prompt[0]"),
        ([[511], [0, 512]], "prompt[1][1]"),
    ],
)
def test_token_ids_are_those_of_the_model(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(prompt=prompt).check_vocabulary(512)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


def test_prompts_times_choices_are_counted() -> None:
    prompts = ["a"] * (MAX_GENERATIONS // 4)
    assert len(parsed(prompt=prompts, n=4).prompts) == len(prompts)
    assert refusal(prompt=[*prompts, "b"], n=4).param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0, "echo": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"suffix": ""}, "suffix"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_values_at_the_edge() -> None:
    assert parsed(max_tokens=0, echo=True).options.max_tokens == 0
    assert parsed(logprobs=0).options.sampling.top_logprobs == 0
    assert parsed(logprobs=20).options.sampling.top_logprobs == 20
    assert parsed(echo=False, logprobs=1).echo is False
    assert parsed(add_special_tokens=False).add_special_tokens is False


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_OPS.items() for value in values])
def test_a_no_op_value_of_a_field_not_honoured_is_accepted(name: str, value: Any) -> None:
    assert parsed(**{name: value}) == parsed()


def test_each_raw_field_has_its_no_ops() -> None:
    raw = {name for name, kind in get_type_hints(CompletionFields).items() if kind == Raw | UnsetType}
    assert raw - {"metadata"} == set(NO_OPS)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m"}',
        b'{"model": "m", "prompt": "\\ud83c"}',
        b'{"model": "m", "prompt": ["a", "\\udc00"]}',
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": [NaN]}',
        b'{"model": "m", "prompt": [1e999]}',
        b'{"model": "m", "prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"model": "m", "prompt": ' + b"[" * 100_000,
        b'{"model": "m", "prompt": [' + b"9" * 100_000 + b"]}",
    ],
)
def test_a_body_that_is_no_sound_json_is_refused_with_a_short_message(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion_request(body).check_vocabulary(512)
    assert 0 < len(str(caught.value)) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(CompletionFields.__struct_fields__), json_values)
def test_any_value_is_taken_or_refused_by_a_name_that_begins_with_the_field(name: str, value: Any) -> None:
    try:
        parsed(**{name: value}).check_vocabulary(512)
    except InvalidRequest as error:
        assert error.param is not None and error.param.startswith(name)
