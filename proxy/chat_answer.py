"""One answer in both of its shapes: the chunks of a stream, or the whole completion.

Folding the chunks (contents joined, last finish_reason, the usage chunk) gives the completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one answer in OpenAI's words."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def completion_usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: Message
    logprobs: None = None
    finish_reason: FinishReason


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[Choice, ...]
    usage: CompletionUsage


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChunkChoice, ...]
    usage: CompletionUsage | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What every chunk of an answer, and the whole of it, has in common."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    system_fingerprint: str
    include_usage: bool = False
    """Every chunk then has a usage field, null in all but the last."""

    def first_chunk(self) -> Chunk:
        return self._chunk((ChunkChoice(delta=Delta(role="assistant", content="", refusal=None)),))

    def text_chunk(self, text: str) -> Chunk:
        return self._chunk((ChunkChoice(delta=Delta(content=text)),))

    def finish_chunk(self, reason: FinishReason) -> Chunk:
        return self._chunk((ChunkChoice(delta=Delta(), finish_reason=reason),))

    def usage_chunk(self, usage: CompletionUsage) -> Chunk:
        return self._chunk((), usage)

    def completion(self, text: str, reason: FinishReason, usage: CompletionUsage) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            choices=(Choice(message=Message(content=text), finish_reason=reason),),
            usage=usage,
        )

    def _chunk(self, choices: tuple[ChunkChoice, ...], usage: CompletionUsage | None = None) -> Chunk:
        return Chunk(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            choices=choices,
            usage=usage if self.include_usage else UNSET,
        )
