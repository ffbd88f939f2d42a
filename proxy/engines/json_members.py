"""Where the members of a JSON object stand in its bytes, so that one can be cut out or put in and the rest stays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^,}\]\s]+")
_NESTING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)


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
    depth = 0
    for found in _NESTING.finditer(data, begin):
        token = data[found.start()]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
            if not depth:
                return found.end()
    raise AssertionError("JSON that was decoded closes every bracket")


def _string_end(data: bytes, begin: int) -> int:
    found = _STRING.match(data, begin)
    assert found is not None, "JSON that was decoded has a string here"
    return found.end()


def _skip_space(data: bytes, begin: int) -> int:
    found = _SPACE.match(data, begin)
    assert found is not None
    return found.end()
