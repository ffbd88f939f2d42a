"""Finds stop strings in text that arrives in any cuts."""

from __future__ import annotations

from collections.abc import Sequence


class _Stop:
    """One stop string with how far the text's end matches it (Knuth, Morris, Pratt 1977).

    word       a b a b c       at "c" after "abab" all is matched; at any other letter the match falls back
    fallback   0 0 1 2 0       to its longest border, here 2, and tries again
    """

    __slots__ = ("_fallback", "_word", "matched_chars")

    def __init__(self, word: str) -> None:
        assert word, "an empty stop string matches everywhere"
        self._word = word
        self._fallback = [0] * len(word)
        self.matched_chars = 0
        length = 0
        for index in range(1, len(word)):
            while length and word[index] != word[length]:
                length = self._fallback[length - 1]
            length += word[index] == word[length]
            self._fallback[index] = length

    def step(self, char: str) -> bool:
        """Takes one more character; True when it completes the stop string."""
        word = self._word
        length = self.matched_chars
        while length and char != word[length]:
            length = self._fallback[length - 1]
        self.matched_chars = length + (char == word[length])
        return self.matched_chars == len(word)


class StopScanner:
    """Lets text through up to the first stop string.

    The first one is that which is complete first, as generation ends there; of several complete at the same character
    the longest. Neither it nor anything after it is emitted. Cost: one comparison a character and stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._matched = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Text safe to emit, and whether a stop string has been seen. A possible beginning of one is held back."""
        if self._matched:
            return "", True
        if not self._stops:
            return text, False
        held = self._held + text
        for index, char in enumerate(text, start=len(self._held)):
            complete = [stop.matched_chars for stop in self._stops if stop.step(char)]
            if complete:
                self._matched = True
                self._held = ""
                return held[: index + 1 - max(complete)], True
        safe_chars = len(held) - max(stop.matched_chars for stop in self._stops)
        self._held = held[safe_chars:]
        return held[:safe_chars], False

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        held, self._held = self._held, ""
        return held
