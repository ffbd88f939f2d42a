"""One answer in both of its shapes: the chunks of a stream, or the whole.

Folding the chunks (texts and log probabilities joined by choice, the finish reasons, the usage chunk) gives the whole:
both are made of the same pieces by the same object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from prefixcache.protocol import LEAST_LOGPROB
from proxy.scored_tokens import ScoredToken

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


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[msgspec.Struct, ...]
    usage: CompletionUsage | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpelling:
    """How tokens are named in log probabilities."""

    token_bytes: Callable[[int], bytes | None]
    token_name: Callable[[int], str | None]

    def text(self, id: int) -> str:
        """A part of a character is spelled as `bytes:\\xf0`, in the manner of OpenAI's completions."""
        data = self.token_bytes(id)
        if data is None:
            return self.token_name(id) or ""
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of an answer, and the whole of it, has in common."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    system_fingerprint: str
    include_usage: bool = False
    """Every chunk then has a usage field, null in all but the last."""
    spelling: TokenSpelling | None = None
    """Log probabilities are told, with tokens named in this way; None: they were not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeChoice:
    """All that came of one choice."""

    text: str
    tokens: Sequence[ScoredToken]
    finish_reason: FinishReason


def json_logprob(value: float) -> float:
    """A log probability that JSON can hold, whatever the worker sent."""
    return max(value, LEAST_LOGPROB)


class Answer(ABC):
    """The parts that differ between chat and text completions are the choices, below."""

    whole_object: str
    chunk_object: str

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    @property
    def include_usage(self) -> bool:
        return self._head.include_usage

    @property
    def is_scored(self) -> bool:
        """Whether log probabilities are told."""
        return self._head.spelling is not None

    def opening(self, choice: int) -> AnswerBody | None:
        """What a stream says of a choice before its first token."""
        opening = self._opening(choice)
        return None if opening is None else self._body(self.chunk_object, (opening,), self._no_usage())

    def piece(self, choice: int, text: str, tokens: Sequence[ScoredToken]) -> AnswerBody:
        """The next text of a choice with the tokens that begin in it."""
        return self._body(self.chunk_object, (self._piece(choice, text, tokens),), self._no_usage())

    def finish(self, choice: int, reason: FinishReason) -> AnswerBody:
        return self._body(self.chunk_object, (self._finish(choice, reason),), self._no_usage())

    def usage(self, usage: CompletionUsage) -> AnswerBody:
        return self._body(self.chunk_object, (), usage)

    def whole(self, choices: Sequence[WholeChoice], usage: CompletionUsage) -> AnswerBody:
        """The choices in the order of their numbers."""
        bodies = tuple(self._whole(number, choice) for number, choice in enumerate(choices))
        return self._body(self.whole_object, bodies, usage)

    @abstractmethod
    def _opening(self, choice: int) -> msgspec.Struct | None: ...

    @abstractmethod
    def _piece(self, choice: int, text: str, tokens: Sequence[ScoredToken]) -> msgspec.Struct: ...

    @abstractmethod
    def _finish(self, choice: int, reason: FinishReason) -> msgspec.Struct: ...

    @abstractmethod
    def _whole(self, choice: int, whole: WholeChoice) -> msgspec.Struct: ...

    def _no_usage(self) -> UnsetType | None:
        return None if self._head.include_usage else UNSET

    def _body(
        self, kind: str, choices: tuple[msgspec.Struct, ...], usage: CompletionUsage | UnsetType | None
    ) -> AnswerBody:
        head = self._head
        return AnswerBody(
            id=head.id,
            object=kind,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
        )
