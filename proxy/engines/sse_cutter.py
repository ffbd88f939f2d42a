"""Cuts a stream of server-sent events into whole events, as bytes, wherever the network has cut it.

    bytes as they come    data: {"a"| :1}\r\n\r |\ndata: [DONE]\n\n
    pieces                data: {"a":1}\r\n\r     \ndata: [DONE]\n\n

Joined, the pieces are the bytes that came. A line ends with LF, CRLF or CR; an event ends with an empty line. An LF
that belongs to the CR before it comes with the next event, where it is an empty line too.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from prefixcache.limits import MAX_SSE_EVENT_BYTES

_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_MOST_END_BYTES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of the stream."""

    data: bytes
    is_event: bool
    """Whether they are one whole event; else a part of one that is longer than the limit."""


class SseCutter:
    """One stream."""

    def __init__(self, most_bytes: int = MAX_SSE_EVENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held = bytearray()
        self.is_overlong = False
        """Whether bytes of the event that now comes were given away already; what is held repeats the last of them."""

    @property
    def is_between_events(self) -> bool:
        """Whether nothing of a further event has come but line ends."""
        return not self.is_overlong and not self._held.strip(b"\r\n")

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is held."""
        return not self._held

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The events that `data` completes, and what is too long to be held; to be taken to its end."""
        if self.is_overlong:
            data = yield from self._rest_of_overlong(data)
        held = self._held
        searched = max(0, len(held) - _MOST_END_BYTES + 1)
        held += data
        begin = 0
        while (found := _END.search(held, searched)) is not None:
            yield Piece(bytes(held[begin : found.end()]), True)
            begin = searched = found.end()
        del held[:begin]
        if len(held) > self._most_bytes:
            piece = bytes(held)
            self.is_overlong = True
            del held[: 1 - _MOST_END_BYTES]
            yield Piece(piece, False)

    def rest(self) -> bytes:
        """What has come of an event that is not complete, at the end of the stream."""
        rest = b"" if self.is_overlong else bytes(self._held)
        self._held.clear()
        self.is_overlong = False
        return rest

    def _rest_of_overlong(self, data: bytes) -> Generator[Piece, None, bytes]:
        """Gives the rest of it away as it comes; returns what came after its end."""
        num_known = len(self._held)
        seen = bytes(self._held) + data
        found = _END.search(seen)
        if found is None:
            self._held[:] = seen[1 - _MOST_END_BYTES :]
            yield Piece(data, False)
            return b""
        self._held.clear()
        self.is_overlong = False
        yield Piece(seen[num_known : found.end()], False)
        return seen[found.end() :]
