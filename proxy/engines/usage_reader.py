"""Reads the usage out of an answer while it is passed on; what passes is never held back, nor changed.

    stream  bytes ──► events ──has "usage"──► JSON ──► the latest word on each count
    whole   bytes ──────────────────end───► JSON

Most bytes are searched for one word and are not looked at again. Where an event, or an answer, is longer than
MAX_SSE_EVENT_BYTES, its usage is given up.
"""

from __future__ import annotations

import re
from typing import Protocol

from prefixcache.limits import MAX_SSE_EVENT_BYTES
from proxy.engines.sse_cutter import SseCutter
from proxy.engines.usage import Usage, usage_in

USAGE_WORD = b'"usage"'
_DATA_LINE = re.compile(rb"(?:^|(?<=[\r\n]))data(?::[ ]?([^\r\n]*))?(?=[\r\n]|$)")
WHOLE_EVENTS = (b"\n\n", b"\r\n\r\n")
"""What data ends with that has no part of a further event in it."""


class AnswerReader(Protocol):
    """What looks at an answer on its way to the client."""

    may_change: bool
    """Whether the client's bytes may be others than the engine's."""

    @property
    def usage(self) -> Usage:
        """All that the engine has said so far."""

    @property
    def is_between_events(self) -> bool:
        """Whether something may be put into the stream here without breaking it."""

    def feed(self, data: bytes) -> bytes:
        """What goes to the client, now that `data` has come."""

    def end(self) -> bytes:
        """What else goes to it, for nothing more will come."""


def event_data(event: bytes) -> bytes:
    """The data of one event: its data lines, joined as the standard says."""
    return b"\n".join(_DATA_LINE.findall(event))


class StreamUsage:
    """Of an answer as server-sent events."""

    may_change = False

    def __init__(self, most_event_bytes: int = MAX_SSE_EVENT_BYTES) -> None:
        self.usage = Usage()
        self._cutter = SseCutter(most_event_bytes)

    @property
    def is_between_events(self) -> bool:
        return self._cutter.is_between_events

    def feed(self, data: bytes) -> bytes:
        if USAGE_WORD not in data and data.endswith(WHOLE_EVENTS) and self._cutter.is_empty:
            return data
        for piece in self._cutter.feed(data):
            if piece.is_event and USAGE_WORD in piece.data:
                self.take(piece.data)
        return data

    def take(self, event: bytes) -> None:
        """One whole event that has the word."""
        found = usage_in(event_data(event))
        if found is not None:
            self.usage = self.usage.updated(found)

    def end(self) -> bytes:
        """An event that is not complete counts for nothing, as it does for the client."""
        return b""


class WholeUsage:
    """Of an answer in one piece."""

    may_change = False

    def __init__(self, most_bytes: int = MAX_SSE_EVENT_BYTES) -> None:
        self.usage = Usage()
        self._most_bytes = most_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0

    @property
    def is_between_events(self) -> bool:
        return False

    def feed(self, data: bytes) -> bytes:
        self._num_bytes += len(data)
        if self._num_bytes <= self._most_bytes:
            self._parts.append(data)
        else:
            self._parts.clear()
        return data

    def end(self) -> bytes:
        whole = b"".join(self._parts)
        self._parts.clear()
        if USAGE_WORD in whole and (found := usage_in(whole)) is not None:
            self.usage = found
        return b""
