"""What a client made of an answer of either shape, streamed or not, and how it differs from what is true."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.sim_oracle import ExpectedAnswer

LOGPROB_TOLERANCE = 1e-4


@dataclass(slots=True, kw_only=True)
class SeenChoice:
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    token_bytes: list[bytes] | None = None
    """Of the tokens with a log probability, in a chat."""
    offsets: list[int] = field(default_factory=list)
    """Likewise, in a completion."""


@dataclass(slots=True, kw_only=True)
class SeenAnswer:
    """Of a stream as far as it came."""

    choices: dict[int, SeenChoice] = field(default_factory=dict)
    usage: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    is_done: bool = False
    """It ended with [DONE], or is no stream."""

    @classmethod
    def of_stream(cls, content: bytes) -> SeenAnswer:
        """An event that was cut off counts for nothing. Raises AssertionError for what is no event."""
        seen = cls()
        *events, _rest = content.decode().split("\n\n")
        for event in events:
            assert event.startswith("data: ") and "\n" not in event, event
            assert not seen.is_done and seen.error is None, f"after the end came {event}"
            data = event.removeprefix("data: ")
            if data == "[DONE]":
                seen.is_done = True
            else:
                seen._take(json.loads(data))
        return seen

    @classmethod
    def of_whole(cls, content: bytes) -> SeenAnswer:
        seen = cls(is_done=True)
        seen._take(json.loads(content))
        return seen

    def _take(self, value: Mapping[str, Any]) -> None:
        self.error = value.get("error") or self.error
        self.usage = value.get("usage") or self.usage
        for given in value.get("choices", ()):
            choice = self.choices.setdefault(given["index"], SeenChoice())
            part = given.get("delta") or given.get("message") or {}
            assert choice.finish_reason is None, f"text after the finish reason: {value}"
            choice.text += given.get("text") or part.get("content") or ""
            choice.finish_reason = given["finish_reason"]
            scores = given.get("logprobs") or {}
            if "content" in scores:
                choice.token_bytes = choice.token_bytes or []
                choice.token_bytes += [bytes(entry["bytes"] or ()) for entry in scores["content"]]
                choice.logprobs += [entry["logprob"] for entry in scores["content"]]
            elif scores:
                choice.logprobs += scores["token_logprobs"]
                choice.offsets += scores["text_offset"]

    def differs(self, expected: Sequence[ExpectedAnswer], *, is_whole: bool = True) -> str | None:
        """What is wrong with it; of one that is not whole, every text must be the beginning of the true one."""
        for index, choice in self.choices.items():
            if index >= len(expected):
                return f"choice {index} was not asked for"
            wrong = _choice_differs(choice, expected[index], is_whole=is_whole)
            if wrong is not None:
                return f"choice {index}: {wrong}"
        if not is_whole:
            return None
        if len(self.choices) != len(expected):
            return f"{len(self.choices)} choices in place of {len(expected)}"
        return None if self.usage is None else self._usage_differs(expected)

    def _usage_differs(self, expected: Sequence[ExpectedAnswer]) -> str | None:
        assert self.usage is not None
        completion = sum(each.completion_tokens for each in expected)
        if self.usage["completion_tokens"] != completion:
            return f"{self.usage['completion_tokens']} completion tokens in place of {completion}"
        prompt = sum(each.prompt_tokens for each in expected if each.choice == 0)
        if self.usage["prompt_tokens"] != prompt:
            return f"{self.usage['prompt_tokens']} prompt tokens in place of {prompt}"
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        if not 0 <= cached <= prompt:
            return f"{cached} cached of {prompt} prompt tokens"
        return None


def _choice_differs(seen: SeenChoice, expected: ExpectedAnswer, *, is_whole: bool) -> str | None:
    if is_whole and (seen.text, seen.finish_reason) != (expected.text, expected.finish_reason):
        return f"{seen.text!r} ({seen.finish_reason}) in place of {expected.text!r} ({expected.finish_reason})"
    if not expected.text.startswith(seen.text):
        return f"{seen.text!r} is no beginning of {expected.text!r}"
    if len(seen.logprobs) > len(expected.logprobs):
        return f"{len(seen.logprobs)} log probabilities in place of {len(expected.logprobs)}"
    for place, (mine, true) in enumerate(zip(seen.logprobs, expected.logprobs, strict=False)):
        if abs(mine - true) > LOGPROB_TOLERANCE:
            return f"log probability {mine} in place of {true} at token {place}"
    if seen.text.isascii() and seen.offsets != list(range(len(seen.offsets))):
        return f"text offsets {seen.offsets}"
    if is_whole and expected.logprobs and not seen.logprobs and expected.text:
        return "no log probabilities"
    if is_whole and seen.token_bytes is not None:
        spelled = b"".join(seen.token_bytes).decode(errors="replace")
        if spelled != seen.text:
            return f"the tokens spell {spelled!r}, the text is {seen.text!r}"
    return None
