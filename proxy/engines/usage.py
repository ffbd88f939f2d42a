"""What an engine says an answer cost, in whichever of the APIs it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer; None for what the engine did not say, which is not zero."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None

    def updated(self, newer: Usage) -> Usage:
        """With what a later word of the engine says besides, or anew."""
        changes: dict[str, Any] = {
            name: value
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
            if (value := getattr(newer, name)) is not None
        }
        return replace(self, **changes)


class _Usage(msgspec.Struct):
    """The spellings of chat and text completions, of responses, and of messages."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    input_tokens_details: Any = None
    cache_read_input_tokens: Any = None
    cache_creation_input_tokens: Any = None


class _Holder(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    usage: _Usage | None = None
    message: _Holder | None = None
    """Of a message_start event."""
    response: _Holder | None = None
    """Of an event that carries the response so far."""


_decoder = msgspec.json.Decoder(_Answer)


def usage_in(data: bytes) -> Usage | None:
    """The usage in a whole answer or an event's data; None if there is none, or if it is no such JSON."""
    try:
        answer = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for found in (
        answer.usage,
        answer.message.usage if answer.message is not None else None,
        answer.response.usage if answer.response is not None else None,
    ):
        if found is not None:
            return _usage_of(found)
    return None


def _usage_of(told: _Usage) -> Usage:
    if told.prompt_tokens is not None:
        return Usage(
            prompt_tokens=_count(told.prompt_tokens),
            cached_tokens=_cached(told.prompt_tokens_details),
            completion_tokens=_count(told.completion_tokens),
        )
    input_tokens, read, created = (
        _count(told.input_tokens),
        _count(told.cache_read_input_tokens),
        _count(told.cache_creation_input_tokens),
    )
    if told.input_tokens_details is not None:
        cached = _cached(told.input_tokens_details)
    else:
        # Of a message, input_tokens are those besides what was read from the cache or written to it.
        cached = read
        if input_tokens is not None:
            input_tokens += (read or 0) + (created or 0)
    return Usage(prompt_tokens=input_tokens, cached_tokens=cached, completion_tokens=_count(told.output_tokens))


def _cached(details: object) -> int | None:
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
