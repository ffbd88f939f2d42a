"""Log probabilities beside the text they belong to, however late the text of a token is known.

    ids      a    <F0>  <9F>  <8E>  <88>   !         one token may be a part of a character
    text     a    .     .     .     🎈     !         what the detokenizer gave for each
    offset   0    1     1     1     1      2         where the text of the token begins

A token is let through with the first piece of text that reaches beyond its offset, so that the tokens beside a text are
those that begin in it: what a stop string cut off or holds back brings no token with it.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prefixcache.protocol import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One output token with its log probabilities."""

    id: int
    offset: int
    """Characters of the output before its text."""
    logprobs: TokenLogprobs


class ScoredTokens:
    """The tokens of one generation that wait for their text."""

    def __init__(self, token_bytes: Callable[[int], bytes | None]) -> None:
        self._token_bytes = token_bytes
        self._without_text: list[tuple[int, TokenLogprobs]] = []
        self._placed: deque[ScoredToken] = deque()
        self._num_chars = 0

    def take(self, id: int, logprobs: TokenLogprobs, text: str) -> None:
        """A token, and the text that it made final."""
        self._without_text.append((id, logprobs))
        if text:
            self._place(text)

    def end(self, text: str) -> None:
        """The text that the end of the output made final."""
        self._place(text)

    def released(self, num_chars: int) -> tuple[ScoredToken, ...]:
        """The next tokens, those that begin within the first `num_chars` characters."""
        tokens: list[ScoredToken] = []
        while self._placed and self._placed[0].offset < num_chars:
            tokens.append(self._placed.popleft())
        return tuple(tokens)

    def rest(self) -> tuple[ScoredToken, ...]:
        """All tokens left, once the output has ended and nothing was cut off."""
        tokens = tuple(self._placed)
        self._placed.clear()
        return tokens

    def _place(self, text: str) -> None:
        """Gives the tokens that made `text` their offsets: inside it the bytes of the tokens before tell."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        chars = 0
        for id, logprobs in self._without_text:
            offset = self._num_chars + min(chars, max(0, len(text) - 1))
            self._placed.append(ScoredToken(id=id, offset=offset, logprobs=logprobs))
            chars += len(decoder.decode(self._token_bytes(id) or b""))
        self._without_text.clear()
        self._num_chars += len(text)
