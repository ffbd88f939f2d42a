"""The assistant's text in a chat's answer: its bytes are kept as they pass, and read once it is over.

    piece ──kept──► AnswerReader ──► client          a list and a count for each piece, nothing is looked at
              └────────over────────► text, or None

None wherever the next turn would not have just this text in its prompt: tool calls, reasoning, a refusal, several
choices, an answer that was not finished. So is one longer than MAX_ANSWER_BYTES.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from prefixcache.limits import MAX_ANSWER_BYTES
from proxy.engines.sse_cutter import SseCutter
from proxy.engines.usage import Usage
from proxy.engines.usage_reader import AnswerReader, event_data

_ENDS = frozenset({"stop", "length"})
"""Finish reasons behind which the user speaks."""


class KeptAnswer:
    """An `AnswerReader` that keeps what another one is given."""

    def __init__(self, reader: AnswerReader, *, is_stream: bool, most_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.may_change = reader.may_change
        self._reader = reader
        self._is_stream = is_stream
        self._left = most_bytes
        self._parts: list[bytes] = []

    @property
    def usage(self) -> Usage:
        return self._reader.usage

    @property
    def is_between_events(self) -> bool:
        return self._reader.is_between_events

    def feed(self, data: bytes) -> bytes:
        if self._left >= 0:
            self._left -= len(data)
            self._parts.append(data)
        elif self._parts:
            self._parts.clear()
        return self._reader.feed(data)

    def end(self) -> bytes:
        return self._reader.end()

    def text(self) -> str | None:
        """What the assistant said; to be asked for when the answer is over."""
        if self._left < 0:
            return None
        data = b"".join(self._parts)
        return _text_of(_events(data) if self._is_stream else [data])


class _Said(msgspec.Struct):
    """A message, or what is new of one."""

    content: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None

    @property
    def is_text_alone(self) -> bool:
        return not (self.tool_calls or self.function_call or self.reasoning_content or self.reasoning or self.refusal)


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """A whole one, or one event of a stream."""

    choices: list[_Choice] = []


_decoder = msgspec.json.Decoder(_Answer)


def _events(data: bytes) -> Iterator[bytes]:
    """The data of each event but the last one, which is no JSON."""
    # Most engines end lines with \n alone: those need not be cut with all the care of the standard (measured: 1 against
    # 3.7 us an event).
    is_plain = b"\r" not in data
    for event in data.split(b"\n\n") if is_plain else (piece.data for piece in SseCutter(len(data)).feed(data)):
        if (content := event_data(event)) and content != b"[DONE]":
            yield content


def _text_of(answers: Iterator[bytes] | list[bytes]) -> str | None:
    texts: list[str] = []
    is_finished = False
    try:
        for choice in (choice for data in answers for choice in _decoder.decode(data).choices):
            said = choice.delta or choice.message
            if choice.index or (said is not None and not said.is_text_alone):
                return None
            if said is not None and said.content:
                texts.append(said.content)
            is_finished = is_finished or choice.finish_reason in _ENDS
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return "".join(texts) if is_finished else None
