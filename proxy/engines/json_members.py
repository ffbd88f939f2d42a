"""Where the members of a JSON object stand in its bytes, so that one can be cut out or put in and the rest stays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

_BACKSLASH = ord("\\")
_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[^,}\]\s]+")
_NESTING = re.compile(rb'["{}\[\]]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member: data[begin:end] is `"key": value`, data[value_begin:end] the value."""

    key: str
    begin: int
    value_begin: int
    end: int


def object_begin(data: bytes) -> int | None:
    """Where the first brace stands, if that is what the bytes begin with."""
    begin = _skip_space(data, 0)
    return begin if data[begin : begin + 1] == b"{" else None


def members(data: bytes, begin: int) -> Iterator[Member]:
    """Members of the object whose brace stands at `begin`, of JSON that was decoded before; linear in its length."""
    place = _skip_space(data, begin + 1)
    while data[place : place + 1] == b'"':
        key_end = _string_end(data, place)
        value_begin = _skip_space(data, _skip_space(data, key_end) + 1)
        end = _value_end(data, value_begin)
        yield Member(
            key=msgspec.json.decode(data[place:key_end], type=str), begin=place, value_begin=value_begin, end=end
        )
        place = _skip_space(data, _skip_space(data, end) + 1)


def without(data: bytes, member: Member) -> bytes:
    """The bytes without the member and the comma that parted it from another one."""
    after = _skip_space(data, member.end)
    if data[after : after + 1] == b",":
        return data[: member.begin] + data[_skip_space(data, after + 1) :]
    before = data[: member.begin].rstrip(b" \t\n\r")
    if before.endswith(b","):
        return before[:-1] + data[member.end :]
    return data[: member.begin] + data[member.end :]


def _value_end(data: bytes, begin: int) -> int:
    first = data[begin : begin + 1]
    if first == b'"':
        return _string_end(data, begin)
    if first not in (b"{", b"["):
        scalar = _SCALAR.match(data, begin)
        assert scalar is not None, "JSON that was decoded has a value here"
        return scalar.end()
    depth, place = 0, begin
    while True:
        found = _NESTING.search(data, place)
        assert found is not None, "JSON that was decoded closes every bracket"
        place = found.end()
        token = found[0]
        if token == b'"':
            place = _string_end(data, found.start())
        elif token in b"{[":
            depth += 1
        else:
            depth -= 1
            if not depth:
                return place


def _string_end(data: bytes, begin: int) -> int:
    """From quote to quote: an expression for all of a long string would hold the interpreter lock for as long."""
    end = begin
    while True:
        end = data.find(b'"', end + 1)
        assert end >= 0, "JSON that was decoded has a string here"
        before = end
        while data[before - 1] == _BACKSLASH:
            before -= 1
        if (end - before) % 2 == 0:
            return end + 1


def _skip_space(data: bytes, begin: int) -> int:
    found = _SPACE.match(data, begin)
    assert found is not None
    return found.end()
