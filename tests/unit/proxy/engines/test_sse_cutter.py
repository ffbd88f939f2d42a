"""Events are found whole, whatever their line ends and wherever the network cuts."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.sse_cutter import Piece, SseCutter
from tests.support.cuts import cut

LINE_ENDS = (b"\n", b"\r\n", b"\r")


def _pieces(cutter: SseCutter, parts: list[bytes]) -> list[Piece]:
    return [piece for part in parts for piece in cutter.feed(part)]


def _contents(pieces: list[Piece]) -> list[bytes]:
    """Events without what ends them, and without empty ones, which a cut inside of a line end may bring about."""
    return [content for piece in pieces if (content := piece.data.strip(b"\r\n"))]


@pytest.mark.parametrize("line_end", LINE_ENDS)
@given(data=st.data())
def test_events_of_any_lines_in_any_cuts(line_end: bytes, data: st.DataObject) -> None:
    lines = st.lists(st.sampled_from([b"data: a", b": ping", b"event: x", "data: Grüße 🙂".encode()]), min_size=1)
    events = data.draw(st.lists(lines, max_size=5))
    stream = b"".join(line_end.join(event) + 2 * line_end for event in events)
    cutter = SseCutter()
    pieces = _pieces(cutter, cut(stream, data))
    assert b"".join(piece.data for piece in pieces) + cutter.rest() == stream
    assert _contents(pieces) == [line_end.join(event) for event in events]
    assert all(piece.is_event for piece in pieces)


@given(data=st.data())
def test_no_byte_is_lost_or_changed_whatever_comes(data: st.DataObject) -> None:
    stream = data.draw(st.binary(max_size=60) | st.text("ad:\r\n", max_size=60).map(str.encode))
    cutter = SseCutter(most_bytes=data.draw(st.integers(4, 12)))
    parts = cut(stream, data)
    seen = b"".join(piece.data for piece in _pieces(cutter, parts))
    assert stream.startswith(seen)
    assert seen + cutter.rest() == stream


@given(data=st.data())
def test_after_an_event_over_the_limit_events_are_found_again(data: st.DataObject) -> None:
    stream = b"data: " + b"x" * 40 + b"\n\ndata: short\n\n"
    cutter = SseCutter(most_bytes=20)
    pieces = _pieces(cutter, cut(stream, data))
    assert b"".join(piece.data for piece in pieces) == stream
    assert pieces[-1] == Piece(b"data: short\n\n", True)
    assert cutter.is_between_events


def test_a_part_of_an_event_over_the_limit_is_no_event() -> None:
    cutter = SseCutter(most_bytes=20)
    assert [piece.is_event for piece in cutter.feed(b"data: " + b"x" * 40)] == [False]
    assert not cutter.is_between_events
    assert cutter.rest() == b"", "all of it was given away"


def test_a_crlf_is_one_line_end() -> None:
    cutter = SseCutter()
    assert _pieces(cutter, [b"data: a\r\n"]) == []
    assert _pieces(cutter, [b"data: b\r\n\r\n"]) == [Piece(b"data: a\r\ndata: b\r\n\r\n", True)]


def test_what_is_between_events() -> None:
    cutter = SseCutter()
    assert cutter.is_between_events and cutter.is_empty
    list(cutter.feed(b"data: a\r\n\r"))
    list(cutter.feed(b"\n"))
    assert cutter.is_between_events
    list(cutter.feed(b"d"))
    assert not cutter.is_between_events


def test_a_long_event_in_small_pieces_takes_linear_time() -> None:
    def seconds(num_bytes: int) -> float:
        cutter, piece = SseCutter(), b"x" * 100
        began = time.process_time()
        for _ in range(num_bytes // 100):
            assert list(cutter.feed(piece)) == []
        return time.process_time() - began

    assert seconds(1_600_000) < 40 * max(seconds(100_000), 1e-3), "16 times the bytes"


@given(st.text("ab\r\n", max_size=40).map(str.encode))
def test_an_empty_line_is_where_the_standard_says(stream: bytes) -> None:
    """Against line splitting as in the specification: LF, CRLF and CR each end one line."""
    lines = re.split(rb"\r\n|\n|\r", stream)[:-1]
    expected = [b"\n".join(group) for group in _groups(lines) if group]
    found = [b"\n".join(re.split(rb"\r\n|\n|\r", content)) for content in _contents(_pieces(SseCutter(), [stream]))]
    assert found == expected


def _groups(lines: list[bytes]) -> list[list[bytes]]:
    """Lines up to each empty one; what no empty line has ended is left out."""
    groups: list[list[bytes]] = [[]]
    for line in lines:
        if line:
            groups[-1].append(line)
        else:
            groups.append([])
    return groups[:-1]
