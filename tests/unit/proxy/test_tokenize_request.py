"""Validation of /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from msgspec import Raw, UnsetType

from prefixcache.errors import InvalidRequest
from proxy.tokenize_request import (
    NO_OPS,
    DetokenizeRequest,
    TokenizeChat,
    TokenizeFields,
    TokenizeText,
    parse_detokenize_request,
    parse_tokenize_request,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def tokenize(**fields: Any) -> TokenizeText | TokenizeChat:
    return parse_tokenize_request(json.dumps({"model": "m", **fields}).encode())


def test_both_kinds() -> None:
    assert tokenize(prompt="") == TokenizeText(model="m", prompt="")
    assert tokenize(prompt="x", add_special_tokens=False) == TokenizeText(
        model="m", prompt="x", add_special_tokens=False
    )
    chat = TokenizeChat(model="m", messages=({"role": "user", "content": "hi"},))
    assert tokenize(messages=MESSAGES) == tokenize(messages=MESSAGES, add_special_tokens=False) == chat
    asked = tokenize(messages=MESSAGES, add_generation_prompt=False)
    assert isinstance(asked, TokenizeChat) and asked.add_generation_prompt is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"prompt": "a", "other": 1}, "other"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenize(**fields)
    assert caught.value.param == param


def test_each_raw_field_has_its_no_ops() -> None:
    assert {name for name, kind in get_type_hints(TokenizeFields).items() if kind == Raw | UnsetType} == set(NO_OPS)
    for name, values in NO_OPS.items():
        for value in (*values, None):
            assert tokenize(messages=MESSAGES, **{name: value}) == tokenize(messages=MESSAGES)


def test_ids_to_text() -> None:
    asked = parse_detokenize_request(b'{"model": "m", "tokens": [1, 2]}')
    assert asked == DetokenizeRequest(model="m", tokens=[1, 2])
    asked.check_vocabulary(3)
    with pytest.raises(InvalidRequest) as caught:
        asked.check_vocabulary(2)
    assert caught.value.param == "tokens[1]"
    for body in (b'{"model": "m"}', b'{"model": "m", "tokens": "1"}', b'{"model": "m", "tokens": [1.5]}'):
        with pytest.raises(InvalidRequest) as caught:
            parse_detokenize_request(body)
        assert caught.value.param is not None and caught.value.param.startswith("tokens")
