"""Pieces of a prompt that are encoded apart, and the memory of their ids.

A special token is a hard border for every tokenizer: nothing is merged, normalized or split across it. So a prompt is
cut after the special tokens its template wrote, and a piece that was seen before, in any prompt, is not encoded again:

    <|im_start|> | system\\nBe brief.<|im_end|> | \\n<|im_start|> | user\\nHi<|im_end|> | \\n<|im_start|> | assistant\\n
       start             special                     special           special ...

A control spelling of the caller's is one more cut on both sides:

    ... | a  | <|im_end|> | b<|im_end|> | ...
               spelling      text
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from prefixcache.rendering.control_tokens import UnmarkedText
from prefixcache.rendering.literals import literal_pattern

Context = Literal["start", "special", "text", "spelling"]
"""start: begins the prompt; special: follows a special token; text: follows a spelling; spelling: is the caller's."""


class Piece(NamedTuple):
    """A run of the prompt with what its ids depend on: the key under which they are remembered."""

    context: Context
    text: str


class PieceCutter:
    """Cuts a prompt where encoding apart changes nothing."""

    def __init__(self, *, added: Collection[str], control: Collection[str], cut_after: Collection[str]) -> None:
        self._control = frozenset(control)
        self._cut_after = frozenset(cut_after)
        # All added tokens and not only those that matter here: the tokenizer takes the longest of all at a place.
        self._pattern = literal_pattern(added)

    def cut(self, prompt: UnmarkedText) -> tuple[Piece, ...]:
        """The pieces of a prompt, in order; their texts joined are the prompt's."""
        text = prompt.text
        pieces: list[Piece] = []
        context: Context = "start"
        begin = 0
        for match in self._pattern.finditer(text):
            spelling = match[0]
            if spelling in self._control and prompt.is_callers(match.start(), match.end()):
                if begin < match.start():
                    pieces.append(Piece(context, text[begin : match.start()]))
                pieces.append(Piece("spelling", spelling))
                context = "text"
            elif spelling in self._cut_after:
                pieces.append(Piece(context, text[begin : match.end()]))
                context = "special"
            else:
                continue
            begin = match.end()
        if begin < len(text):
            pieces.append(Piece(context, text[begin:]))
        return tuple(pieces)

    def num_control(self, text: str) -> int:
        """Control tokens that are spelled in a text."""
        return sum(match[0] in self._control for match in self._pattern.finditer(text))


class PieceCache:
    """The ids of the pieces used last, within a budget of memory; shared by threads."""

    ENTRY_BYTES = 400
    """Cost of an entry beside its characters and ids: dict slots, tuple, string, array (measured)."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Piece, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def lookup(self, pieces: Sequence[Piece]) -> list[array[int] | None]:
        """Ids of each piece, None for one that is not there."""
        found: list[array[int] | None] = []
        with self._lock:
            for piece in pieces:
                ids = self._entries.get(piece)
                if ids is not None:
                    self._entries.move_to_end(piece)
                found.append(ids)
        return found

    def store(self, piece: Piece, ids: array[int]) -> None:
        """Remembers a piece; one over an eighth of the budget would push out too much and is let go."""
        size = self._size(piece, ids)
        if size > self._max_bytes // 8:
            return
        with self._lock:
            if piece in self._entries:
                return
            self._entries[piece] = ids
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._size(*self._entries.popitem(last=False))

    def uncached_chars(self, pieces: Sequence[Piece]) -> int:
        """Characters of the pieces that are not there."""
        with self._lock:
            return sum(len(piece.text) for piece in pieces if piece not in self._entries)

    def _size(self, piece: Piece, ids: array[int]) -> int:
        # Four bytes a character is what a string with an emoji takes, and the most that any takes.
        return self.ENTRY_BYTES + 4 * len(piece.text) + ids.itemsize * len(ids)
