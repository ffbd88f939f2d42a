"""The fields that chat and text completions share: one table, played on both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.errors import InvalidRequest
from prefixcache.limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from prefixcache.protocol import Sampling
from proxy.chat_request import parse_chat_request
from proxy.completion_request import parse_completion_request
from proxy.sampling_fields import GenerationOptions, SamplingFields

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def _options(surface: str, **fields: Any) -> GenerationOptions:
    if surface == "chat":
        return parse_chat_request(json.dumps({**CHAT, **fields}).encode()).options
    return parse_completion_request(json.dumps({**COMPLETION, **fields}).encode()).options


surfaces = pytest.mark.parametrize("surface", ["chat", "completion"])


@surfaces
def test_every_field(surface: str) -> None:
    options = _options(
        surface,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": False},
        n=3,
        best_of=3,
        max_tokens=7,
        min_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.05,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "0": 1.5},
        seed=11,
        stop=["a", "b"],
        stop_token_ids=[7, 8, 7],
        ignore_eos=True,
        cache_salt="tenant",
        user="u",
        metadata={"k": "v"},
    )
    assert options == GenerationOptions(
        model="m",
        stream=True,
        include_usage=True,
        n=3,
        max_tokens=7,
        usual_max_tokens=options.usual_max_tokens,
        seed=11,
        sampling=Sampling(
            seed=0,
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            min_p=0.05,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=1.1,
            logit_bias={5: -100, 0: 1.5},
            min_tokens=5,
        ),
        stop=("a", "b"),
        stop_token_ids=(7, 8),
        ignore_eos=True,
        cache_salt="tenant",
    )


@surfaces
@pytest.mark.parametrize("name", sorted(set(SamplingFields.__struct_fields__) - {"model"}))
def test_null_asks_for_the_default(surface: str, name: str) -> None:
    assert _options(surface, **{name: None}) == _options(surface)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": MAX_CHOICES + 1}, "n"),
    ({"n": True}, "n"),
    ({"n": "1"}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 2**70}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 2**31}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": True}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 2**70}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias[...]"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": -101}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"five": 5}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 5}}, "logit_bias"),
    ({"logit_bias": {"": 5}}, "logit_bias"),
    ({"logit_bias": {"9" * 11: 5}}, "logit_bias"),
    ({"logit_bias": {str(id): 1 for id in range(MAX_LOGIT_BIAS_TOKENS + 1)}}, "logit_bias"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": 3}, "stop"),
    ({"stop": ["a"] * (MAX_STOP_STRINGS + 1)}, "stop"),
    ({"stop": "a" * (MAX_STOP_STRING_CHARS + 1)}, "stop"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"cache_salt": 3}, "cache_salt"),
    ({"user": 3}, "user"),
    ({"metadata": []}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a": "x" * 70_000}}, "metadata"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"extra_body": {"chat_template": "{{ 1 }}"}}, "extra_body"),
]


@surfaces
@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_a_wrong_value_is_refused_by_name(surface: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _options(surface, **fields)
    assert caught.value.param == param
    assert 0 < len(str(caught.value)) < 300


@surfaces
@pytest.mark.parametrize(("given_seed", "seed"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)])
def test_seeds_of_64_bits_with_and_without_sign(surface: str, given_seed: int, seed: int) -> None:
    assert _options(surface, seed=given_seed).seed == seed


@surfaces
@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("temperature", 0, 0),
        ("temperature", 2, 2),
        ("top_k", -1, None),
        ("top_k", 0, None),
        ("top_k", 1, 1),
        ("min_p", 1, 1),
        ("repetition_penalty", 10, 10),
        ("min_tokens", 0, 0),
        ("logit_bias", {}, {}),
        ("logit_bias", {"007": 1}, {7: 1}),
    ],
)
def test_values_at_the_edge(surface: str, name: str, value: Any, taken: Any) -> None:
    assert getattr(_options(surface, **{name: value}).sampling, name) == taken


@surfaces
def test_stop_strings(surface: str) -> None:
    assert _options(surface, stop="end").stop == ("end",)
    assert _options(surface, stop=[]).stop == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"9": 1, "10": 1}}, "logit_bias"),
        ({"stop_token_ids": [9, 10]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ],
)
def test_token_ids_are_those_of_the_model(fields: dict[str, Any], param: str) -> None:
    options = _options("chat", **fields)
    with pytest.raises(InvalidRequest) as caught:
        options.check_vocabulary(10)
    assert caught.value.param == param


def test_the_last_id_of_the_model_is_one_of_them() -> None:
    _options("chat", logit_bias={"10": 1}, stop_token_ids=[0, 10]).check_vocabulary(11)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["chat", "completion"]), st.sampled_from(SamplingFields.__struct_fields__), json_values)
def test_any_value_is_taken_or_refused_by_a_name_that_begins_with_the_field(
    surface: str, name: str, value: Any
) -> None:
    try:
        _options(surface, **{name: value}).check_vocabulary(512)
    except InvalidRequest as error:
        assert error.param is not None and error.param.startswith(name)
