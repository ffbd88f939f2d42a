"""The two shapes of an answer are one answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from proxy.chat_answer import ChatAnswer, Chunk, FinishReason, completion_usage
from proxy.sse_stream import event

ANSWER = ChatAnswer(id="chatcmpl-1", created=7, model="m", system_fingerprint="fp_1", include_usage=True)
reasons: st.SearchStrategy[FinishReason] = st.sampled_from(("stop", "length"))
counts = st.integers(0, 10**6)


def _folded(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The completion a client can build from a stream."""
    message: dict[str, Any] = {}
    finish_reason = None
    usage = None
    for chunk in chunks:
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                message[name] = message[name] + value if name == "content" and name in message else value
            finish_reason = choice["finish_reason"] or finish_reason
    first = chunks[0]
    return {
        "id": first["id"],
        "object": "chat.completion",
        "created": first["created"],
        "model": first["model"],
        "system_fingerprint": first["system_fingerprint"],
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}],
        "usage": usage,
    }


def _json(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


@given(st.lists(st.text()), reasons, counts, counts, counts)
def test_folding_the_stream_gives_the_whole_answer(
    texts: list[str], reason: FinishReason, prompt_tokens: int, completion_tokens: int, cached_tokens: int
) -> None:
    usage = completion_usage(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=cached_tokens
    )
    chunks = [
        ANSWER.first_chunk(),
        *map(ANSWER.text_chunk, texts),
        ANSWER.finish_chunk(reason),
        ANSWER.usage_chunk(usage),
    ]
    whole = ANSWER.completion("".join(texts), reason, usage)
    assert _folded(_json(chunks)) == _json(whole)
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(msgspec.json.encode(chunk), strict=True)
    ChatCompletion.model_validate_json(msgspec.json.encode(whole), strict=True)


@given(st.text())
def test_an_event_is_one_data_line(text: str) -> None:
    data = event(ANSWER.text_chunk(text))
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    assert b"\n" not in data[:-2] and b"\r" not in data
    assert json.loads(data[6:])["choices"][0]["delta"] == {"content": text}


def test_without_the_option_no_chunk_has_a_usage_field() -> None:
    answer = ChatAnswer(id="i", created=1, model="m", system_fingerprint="f")
    chunks: list[Chunk] = [answer.first_chunk(), answer.text_chunk("x"), answer.finish_chunk("stop")]
    assert all("usage" not in chunk for chunk in msgspec.to_builtins(chunks))


def test_total_is_prompt_plus_completion() -> None:
    usage = completion_usage(prompt_tokens=30, completion_tokens=12, cached_tokens=16)
    assert msgspec.to_builtins(usage) == {
        "prompt_tokens": 30,
        "completion_tokens": 12,
        "total_tokens": 42,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
