"""Canonical bytes: equal for what is one prompt, different for what is not, and only added to as a chat goes on."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.rendering.canonical import canonical_chat, canonical_completion
from prefixcache.rendering.chat_body import chat_form

texts = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
parts = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": texts})}),
)
calls = st.fixed_dictionaries(
    {"id": texts, "type": st.just("function"), "function": st.fixed_dictionaries({"name": texts, "arguments": texts})}
)
messages = st.fixed_dictionaries(
    {"role": texts, "content": texts | st.none() | st.lists(parts, max_size=3)},
    optional={
        "name": texts,
        "tool_call_id": texts,
        "reasoning_content": texts,
        "tool_calls": st.lists(calls, min_size=1, max_size=2),
        "unheard_of": json_values,
        "at_all": json_values,
    },
)
chats = st.lists(messages, min_size=1, max_size=5)
tools = st.lists(st.dictionaries(texts, json_values, max_size=3), max_size=2)


def canonical(messages: list[dict[str, Any]], **body: Any) -> bytes:
    return canonical_chat(chat_form({"messages": messages, **body}))


def reordered(value: Any) -> Any:
    """The same data with the keys of every object the other way round."""
    if isinstance(value, dict):
        return {key: reordered(item) for key, item in reversed(value.items())}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def meaning(message: dict[str, Any]) -> str:
    """What of a message must make a difference, written in another way than the canonical bytes."""
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    kept = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            kept[name] = message[name]
    return json.dumps({**kept, "role": message["role"], "content": content or []}, sort_keys=True)


@given(chats, chats, tools)
def test_a_longer_chat_adds_to_the_bytes_of_a_shorter_one(
    first: list[dict[str, Any]], more: list[dict[str, Any]], tools: list[Any]
) -> None:
    shorter, longer = canonical(first, tools=tools), canonical(first + more, tools=tools)
    assert longer.startswith(shorter)
    assert len(longer) > len(shorter)


@given(chats, tools)
def test_the_order_of_keys_does_not_matter(chat: list[dict[str, Any]], tools: list[Any]) -> None:
    assert canonical(reordered(chat), tools=reordered(tools)) == canonical(chat, tools=tools)


@given(chats, chats)
def test_different_chats_have_different_bytes(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    are_equal = [meaning(message) for message in first] == [meaning(message) for message in second]
    assert (canonical(first) == canonical(second)) == are_equal


@given(st.lists(texts, min_size=1, max_size=4), st.lists(texts, min_size=1, max_size=4))
def test_texts_do_not_run_into_each_other(first: list[str], second: list[str]) -> None:
    chats = [[{"role": "user", "content": text} for text in chat] for chat in (first, second)]
    assert (canonical(chats[0]) == canonical(chats[1])) == (first == second)


@given(texts, texts, texts)
def test_two_texts_share_their_bytes_as_far_as_they_are_equal(common: str, first: str, second: str) -> None:
    shared = canonical([{"role": "user", "content": common}]) if common else b""
    for text in (first, second):
        assert canonical([{"role": "user", "content": common + text}]).startswith(shared)


def test_the_layout() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "é", "x": {"b": 1, "a": [None]}},
    ]
    assert canonical(chat, tools=[{"b": 1, "a": 2}]) == (
        b'\xf8c\xf9{"a":2,"b":1}\xfbuser\xfeHi\xfbassistant\xfe\xc3\xa9\xfcx\xc0{"a":[null],"b":1}'
    )


def test_a_document_and_a_tool_stand_before_the_messages() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    given = canonical(chat, tools=[{"name": "t"}], documents=[{"text": "d"}])
    assert given.index(b"\xf9") < given.index(b"\xfa") < given.index(b"\xfb")
    assert canonical(chat, documents=[{"text": "d"}]) != canonical(chat, tools=[{"text": "d"}])


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.3, "max_tokens": 3, "stream": True, "seed": 1, "stop": ["x"], "logit_bias": {"1": 2}},
        {"response_format": {"type": "json_object"}, "user": "u", "metadata": {"a": "b"}, "model": "m"},
        {"tool_choice": "none", "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
        {"unheard_of": {"deep": [1]}, "add_generation_prompt": False},
    ],
)
def test_what_does_not_stand_in_a_prompt_does_not_matter(body: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert canonical(chat, **body) == canonical(chat)


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_empty_fields_as_sdks_send_them_do_not_matter(empty: Any) -> None:
    bare = {"role": "assistant", "content": "Hi"}
    assert canonical([{**bare, "refusal": empty, "annotations": empty, "audio": empty}]) == canonical([bare])


def test_a_cache_mark_that_moves_on_does_not_matter() -> None:
    marked: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "there", "cache_control": {"type": "ephemeral"}},
    ]
    tools = [{"name": "t", "cache_control": {"type": "ephemeral"}}]
    plain = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "there"}]
    assert canonical(marked, tools=tools) == canonical(plain, tools=[{"name": "t"}])


def test_an_unpaired_surrogate_is_a_text_like_any_other() -> None:
    assert canonical([{"role": "user", "content": "\ud800"}]) != canonical([{"role": "user", "content": "\udfff"}])


def test_whole_prompts() -> None:
    ids = array("I", [1, 2])
    assert canonical_completion("Hi there").startswith(canonical_completion("Hi"))
    assert canonical_completion(ids) == b"\xf8i\1\0\0\0\2\0\0\0"
    assert len({canonical_completion("i"), canonical_completion(ids), canonical([{"role": "i", "content": ""}])}) == 3
