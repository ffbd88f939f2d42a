"""Asks an engine for the usage of a stream, without its client seeing anything of it.

    body    {"stream": true, ...}        ──► {"stream_options":{"include_usage":true},"stream": true, ...}
    stream  {"choices":[..],"usage":null} ──► {"choices":[..]}
            {"choices":[],"usage":{...}}  ──► read, and left out

All other bytes stay as they are, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from prefixcache.limits import MAX_SSE_EVENT_BYTES
from proxy.engines.body_edit import BodyEdit
from proxy.engines.json_members import Member, members, object_begin, without
from proxy.engines.sse_cutter import SseCutter
from proxy.engines.usage import Usage
from proxy.engines.usage_reader import USAGE_WORD, WHOLE_EVENTS, StreamUsage, event_data

_MEMBER = b'"stream_options":{"include_usage":true}'
_INCLUDE = b'"include_usage":true'


def asking_for_usage(body: bytes, parsed: Mapping[str, object]) -> BodyEdit | None:
    """What asks for the usage of a stream in the body of a chat or text completion; None where that is not to be done.

    `parsed` is what the body says. Not a stream, asked for by the client itself, or nothing an engine would accept:
    then the body goes as it is.
    """
    if parsed.get("stream") is not True:
        return None
    begin = object_begin(body)
    assert begin is not None, "what was parsed to an object begins with a brace"
    options = parsed.get("stream_options")
    if "stream_options" not in parsed:
        return _insertion(begin + 1, _MEMBER + b",")
    if options is not None and not isinstance(options, dict):
        return None
    if options is not None and options.get("include_usage"):
        return None
    standing = _last(body, begin, "stream_options")
    if options is None:
        return BodyEdit(begin=standing.value_begin, end=standing.end, new=b'{"include_usage":true}')
    if "include_usage" in options:
        flag = _last(body, standing.value_begin, "include_usage")
        return BodyEdit(begin=flag.value_begin, end=flag.end, new=b"true")
    return _insertion(standing.value_begin + 1, _INCLUDE + (b"," if options else b""))


class UsageFilter:
    """A stream without what `asking_for_usage` brought into it; reads the usage on the way."""

    may_change = True

    def __init__(self, most_event_bytes: int = MAX_SSE_EVENT_BYTES) -> None:
        self._cutter = SseCutter(most_event_bytes)
        self._reader = StreamUsage(most_event_bytes)
        self._ended_in_cr = False
        self._was_left_out = False
        """Of the last piece: a LF that comes after its CR shares its fate."""

    @property
    def usage(self) -> Usage:
        return self._reader.usage

    @property
    def is_between_events(self) -> bool:
        """As far as the client knows: of an event that is not whole it has nothing, unless it is too long."""
        return not self._cutter.is_overlong

    def feed(self, data: bytes) -> bytes:
        """An event goes when it is whole."""
        if USAGE_WORD not in data and data.endswith(WHOLE_EVENTS) and self._cutter.is_empty and not self._ended_in_cr:
            return data
        kept: list[bytes] = []
        if self._ended_in_cr and data.startswith(b"\n"):
            data = data[1:]
            if not self._was_left_out:
                kept.append(b"\n")
        content = b""
        for piece in self._cutter.feed(data):
            content = piece.data
            passed = self._passed(content) if piece.is_event else content
            kept.append(passed)
            self._was_left_out = not passed
        self._ended_in_cr = content.endswith(b"\r") and self._cutter.is_empty
        return b"".join(kept)

    def end(self) -> bytes:
        """An event that never became whole."""
        return self._cutter.rest()

    def _passed(self, event: bytes) -> bytes:
        if USAGE_WORD not in event:
            return event
        self._reader.take(event)
        return without_usage(event)


def without_usage(event: bytes) -> bytes:
    """An event without its usage; b"" if it had nothing else to say. One that is no JSON stays as it is."""
    data = event_data(event)
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return event
    if not isinstance(parsed, dict) or "usage" not in parsed:
        return event
    if parsed["usage"] is not None and parsed.get("choices") == []:
        return b""
    begin = object_begin(data)
    assert begin is not None
    place = event.find(data)
    if place < 0:
        # Its data stands on several lines, which JSON does not care about.
        return event
    while found := [member for member in members(data, begin) if member.key == "usage"]:
        data, cut = without(data, found[-1]), data
        event = event[:place] + data + event[place + len(cut) :]
    return event


def _insertion(place: int, new: bytes) -> BodyEdit:
    return BodyEdit(begin=place, end=place, new=new)


def _last(data: bytes, begin: int, key: str) -> Member:
    """Of several members with one key the last one counts."""
    return [member for member in members(data, begin) if member.key == key][-1]
