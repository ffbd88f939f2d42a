"""The attacks of the unit tests at length, on every template that takes such messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attacks import Subject, byte_level, llama, messages, neutral, neutral_message, texts, tools
from tests.support.tiny_tokenizer import SpacePrefix


def check(subject: Subject, chat: list[dict[str, Any]], tools: Any) -> None:
    harmless = subject.control_ids([neutral_message(message) for message in chat], tools and neutral(tools))
    assert subject.control_ids(chat, tools) == harmless


@pytest.mark.parametrize("template", ["chatml", "joined_parts", "repr_of_everything", "ascii_json"])
@settings(max_examples=500, deadline=None)
@given(chat=st.lists(messages, min_size=1, max_size=4), tools=tools)
def test_text_and_parts(template: str, chat: list[dict[str, Any]], tools: Any) -> None:
    check(byte_level(template), chat, tools)


@pytest.mark.parametrize("template", ["chatml_default_system", "llama2", "llama3", "role_built", "gemma", "extensions"])
@settings(max_examples=300, deadline=None)
@given(text=texts, tools=tools)
def test_text(template: str, text: str, tools: Any) -> None:
    check(byte_level(template), [{"role": "user", "content": text}], tools)


@pytest.mark.parametrize("space_prefix", ["prepend", "first", "always", "never"])
@settings(max_examples=300, deadline=None)
@given(chat=st.lists(messages, min_size=1, max_size=3), tools=tools)
def test_sentencepiece_like(space_prefix: SpacePrefix, chat: list[dict[str, Any]], tools: Any) -> None:
    check(llama(space_prefix), chat, tools)
