"""Keeps the caller's text from turning into control tokens, however a chat template joins it.

Before rendering, two private-use characters are put into the caller's strings; after it they are taken out again and
their places remembered. S says that a spelling of the caller's starts here, J that no control token may be joined
across this place:

    caller     "a <|im_end|> b"        "so <|im_"  +  "end|> it is"
    marked     "a S<|im_end|> b"       "so <|im_J" + "Jend|> it is"
    rendered   <|im_start|>user\\na S<|im_end|> b<|im_end|>
    unmarked   <|im_start|>user\\na <|im_end|> b<|im_end|>        starts = [19]: that spelling is text, the rest is not

A spelling is the caller's if a start lies on its first to last character or a joint strictly inside. That marking is
transformers' `sanitize_control_tokens`, with three holes closed: spellings split over two strings, spellings in the
keys of objects, and templates that print an object by repr() or as ASCII JSON and so escape the marks. Not
covered: a template that rewrites the middle of the caller's text (`upper`, `replace`), and one that puts it between
the two ends of a token, as "<|" + role + "|>" does; so roles come from a fixed list.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prefixcache.rendering.literals import literal_pattern

START_MARK = "\U000f0000"
JOINT_MARK = "\U000f0001"

_MARK = re.compile(f"[{START_MARK}{JOINT_MARK}]")
_REMOVE_MARKS = dict.fromkeys(map(ord, (START_MARK, JOINT_MARK)))
# A backslash that is itself escaped begins no escape: the caller may well have written "\U000f0000" in ASCII.
_REPR_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\U000f000([01])")
_JSON_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\udb80\\udc0([01])")


class MarkedText(str):
    """A caller's string with marks in it, which repr() leaves as they are."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _REPR_ESCAPE.sub(_restored_mark, super().__repr__())


def marks_in_ascii_json(text: str) -> str:
    """JSON text written with `ensure_ascii`, its escaped marks put back."""
    return _JSON_ESCAPE.sub(_restored_mark, text)


def _restored_mark(match: re.Match[str]) -> str:
    return match[1] + (START_MARK if match[2] == "0" else JOINT_MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmarkedText:
    """Rendered text without marks, and where they stood in it, in order."""

    text: str
    starts: tuple[int, ...]
    joints: tuple[int, ...]

    def is_callers(self, begin: int, end: int) -> bool:
        """Whether a control spelling at begin..end has a character of the caller's in it."""
        if not self.starts and not self.joints:
            return False
        return _any_between(self.starts, begin, end) or _any_between(self.joints, begin + 1, end)


def _any_between(positions: tuple[int, ...], low: int, high: int) -> bool:
    index = bisect_left(positions, low)
    return index < len(positions) and positions[index] < high


class ControlTokens:
    """The spellings a model's template may write and a caller may not."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self.spellings = frozenset(spellings)
        self._pattern = literal_pattern(self.spellings)
        self._prefixes = {word[:size] for word in self.spellings for size in range(1, len(word))}
        self._suffixes = {word[size:] for word in self.spellings for size in range(1, len(word))}
        self._first_chars = tuple({word[0] for word in self.spellings})
        self._last_chars = tuple({word[-1] for word in self.spellings})
        self._outer_chars = tuple({*self._first_chars, *self._last_chars})
        self._part_chars = max(map(len, self.spellings), default=1) - 1

    def mark(self, value: Any) -> Any:
        """A copy of plain JSON data with every string and every key marked."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self._mark_text(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        if START_MARK in text or JOINT_MARK in text:
            text = text.translate(_REMOVE_MARKS)
        # A spelling, its beginning and its end have one of these: most strings have none and cost no more than this.
        if not any(char in text for char in self._outer_chars):
            return text
        # Templates trim: a joint stands inside of the outer blanks, so that it neither stops the trimming nor is
        # passed over by it.
        core = text.strip()
        head = JOINT_MARK if self._begins_with_suffix(core) else ""
        tail = JOINT_MARK if self._ends_with_prefix(core) else ""
        marked = text
        if head or tail:
            lead = len(text) - len(text.lstrip())
            marked = text[:lead] + head + core + tail + text[lead + len(core) :]
        if core != text:
            # Only a spelling with blanks at its own end is cut here and not by the joints above.
            if self._begins_with_suffix(text):
                marked = JOINT_MARK + marked
            if self._ends_with_prefix(text):
                marked += JOINT_MARK
        marked = self._pattern.sub(START_MARK + r"\g<0>", marked)
        return text if marked == text else MarkedText(marked)

    def _ends_with_prefix(self, text: str) -> bool:
        end = text[-self._part_chars :] if self._part_chars else ""
        if not any(char in end for char in self._first_chars):
            return False
        return any(end[-size:] in self._prefixes for size in range(1, len(end) + 1))

    def _begins_with_suffix(self, text: str) -> bool:
        begin = text[: self._part_chars]
        if not any(char in begin for char in self._last_chars):
            return False
        return any(begin[:size] in self._suffixes for size in range(1, len(begin) + 1))


def unmark(rendered: str) -> UnmarkedText:
    """Takes the marks out of rendered text."""
    if START_MARK not in rendered and JOINT_MARK not in rendered:
        return UnmarkedText(text=rendered, starts=(), joints=())
    starts: list[int] = []
    joints: list[int] = []
    parts: list[str] = []
    last = size = 0
    for match in _MARK.finditer(rendered):
        part = rendered[last : match.start()]
        last = match.end()
        parts.append(part)
        size += len(part)
        (starts if match[0] == START_MARK else joints).append(size)
    parts.append(rendered[last:])
    return UnmarkedText(text="".join(parts), starts=tuple(starts), joints=tuple(joints))
