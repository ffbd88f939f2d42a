"""The answer to a text completion, in the older of OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.answer import Answer, AnswerHead, FinishReason, TokenSpelling, WholeChoice, json_logprob
from proxy.scored_tokens import ScoredToken


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists of the same length."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    """The drawn token is always among them; of two tokens spelled alike the likelier one stands."""
    text_offset: tuple[int, ...]
    """Characters of the choice's text before the token."""


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class CompletionAnswer(Answer):
    """See `Answer`; `echoes` are the texts that stand before the answers to each prompt, or there are none."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, head: AnswerHead, *, echoes: Sequence[str] = (), n: int = 1) -> None:
        super().__init__(head)
        self._echoes = echoes
        self._n = n

    def _opening(self, choice: int) -> TextChoice | None:
        return self._piece(choice, self._echo(choice), ()) if self._echoes else None

    def _piece(self, choice: int, text: str, tokens: Sequence[ScoredToken]) -> TextChoice:
        return TextChoice(index=choice, text=text, logprobs=self._logprobs(tokens), finish_reason=None)

    def _finish(self, choice: int, reason: FinishReason) -> TextChoice:
        return TextChoice(index=choice, text="", logprobs=self._logprobs(()), finish_reason=reason)

    def _whole(self, choice: int, whole: WholeChoice) -> TextChoice:
        return TextChoice(
            index=choice,
            text=self._echo(choice) + whole.text,
            logprobs=self._logprobs(whole.tokens),
            finish_reason=whole.finish_reason,
        )

    def _echo(self, choice: int) -> str:
        return self._echoes[choice // self._n] if self._echoes else ""

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> TextLogprobs | None:
        spelling = self._head.spelling
        if spelling is None:
            return None
        return TextLogprobs(
            tokens=tuple(spelling.text(token.id) for token in tokens),
            token_logprobs=tuple(json_logprob(token.logprobs.logprob) for token in tokens),
            top_logprobs=tuple(_top(spelling, token) for token in tokens),
            text_offset=tuple(token.offset for token in tokens),
        )


def _top(spelling: TokenSpelling, token: ScoredToken) -> dict[str, float]:
    top: dict[str, float] = {}
    for id, logprob in token.logprobs.top:
        top.setdefault(spelling.text(id), json_logprob(logprob))
    top.setdefault(spelling.text(token.id), json_logprob(token.logprobs.logprob))
    return top
