"""The answer to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from proxy.answer import Answer, FinishReason, TokenSpelling, WholeChoice, json_logprob
from proxy.scored_tokens import ScoredToken


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    """Null for a token that adds nothing to the text."""


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: tuple[ChatLogprob, ...]
    refusal: None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatAnswer(Answer):
    """See `Answer`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _opening(self, choice: int) -> ChatChunkChoice:
        delta = Delta(role="assistant", content="", refusal=None)
        return ChatChunkChoice(index=choice, delta=delta, logprobs=self._logprobs(()))

    def _piece(self, choice: int, text: str, tokens: Sequence[ScoredToken]) -> ChatChunkChoice:
        return ChatChunkChoice(index=choice, delta=Delta(content=text), logprobs=self._logprobs(tokens))

    def _finish(self, choice: int, reason: FinishReason) -> ChatChunkChoice:
        return ChatChunkChoice(index=choice, delta=Delta(), finish_reason=reason)

    def _whole(self, choice: int, whole: WholeChoice) -> ChatChoice:
        return ChatChoice(
            index=choice,
            message=Message(content=whole.text),
            logprobs=self._logprobs(whole.tokens),
            finish_reason=whole.finish_reason,
        )

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
        spelling = self._head.spelling
        if spelling is None:
            return None
        return ChatLogprobs(content=tuple(_logprob(spelling, token) for token in tokens))


def _logprob(spelling: TokenSpelling, token: ScoredToken) -> ChatLogprob:
    return ChatLogprob(
        token=spelling.text(token.id),
        logprob=json_logprob(token.logprobs.logprob),
        bytes=_byte_list(spelling, token.id),
        top_logprobs=tuple(
            TopLogprob(token=spelling.text(id), logprob=json_logprob(logprob), bytes=_byte_list(spelling, id))
            for id, logprob in token.logprobs.top
        ),
    )


def _byte_list(spelling: TokenSpelling, id: int) -> list[int] | None:
    data = spelling.token_bytes(id)
    return None if data is None else list(data)
