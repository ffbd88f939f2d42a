"""Traces as they are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from prefixcache.simulation.trace_files import read_trace
from tests.unit.prefixcache.simulation.traces import CHATS_FILE, chats, coding


def _written(folder: Path, *lines: object) -> Path:
    path = folder / "some.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


META = {"meta": {"block": 64}}


def test_compact(tmp_path: Path) -> None:
    row = {"t": 1500, "in": 330, "out": 7, "b": [10, 2, 40, 4], "s": 3, "th": 250}
    trace = read_trace(_written(tmp_path, META, {"t": 0, "in": 128, "out": 0, "b": [10, 2]}, "", row))
    assert (trace.name, trace.block_tokens, trace.is_closed_loop) == ("some", 64, True)
    first, second = trace.requests
    assert (first.blocks, first.reusable_blocks, first.session) == ((10, 11), 1, None)
    # 330 tokens are five whole blocks and ten tokens of a sixth, whose name is not of use.
    assert second.blocks == (10, 11, 40, 41, 42)
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens) == (1.5, 330, 7)
    assert (second.reusable_blocks, second.session, second.think_s) == (5, 3, 0.25)
    assert (trace.num_unique_blocks, trace.prompt_tokens, trace.duration_s) == (5, 458, 1.5)


def test_mooncake(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [0]},
    ]
    trace = read_trace(_written(tmp_path, *rows))
    assert (trace.block_tokens, trace.is_closed_loop) == (512, False)
    assert [request.arrival_s for request in trace.requests] == [0.0, 2.0]
    assert [request.blocks for request in trace.requests] == [(0,), (0, 1)]
    assert [request.reusable_blocks for request in trace.requests] == [0, 2]


def test_lengths_alone_share_nothing(tmp_path: Path) -> None:
    trace = read_trace(_written(tmp_path, {"meta": {"source": "x"}}, [0, 1100, 10], [20, 1100, 10]))
    first, second = trace.requests
    assert len(first.blocks) == 2 and not set(first.blocks) & set(second.blocks)
    assert second.arrival_s == 0.02


def test_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "mooncake_conversation_part.jsonl.gz"
    path.write_bytes(gzip.compress(CHATS_FILE.read_bytes()))
    assert read_trace(path) == chats()


def test_parts_of_public_traces() -> None:
    assert (len(chats().requests), chats().is_closed_loop) == (250, False)
    assert (len(coding().requests), coding().is_closed_loop) == (160, True)
    shared = chats().requests[0].blocks[0]
    assert all(request.blocks[:1] in ((), (shared,)) for request in chats().requests)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("{",), "line 1 is no JSON"),
        ((), "has no requests"),
        ((META,), "has no requests"),
        (({"t": 0, "in": 1, "out": 1, "b": []},), 'line 1: the first line must be {"meta"'),
        ((META, {"t": 0, "in": 64, "b": [1, 1]}), "line 2: 'out' is missing"),
        ((META, {"t": 0, "in": 64, "out": 1, "b": [1]}), "line 2: b is [1]; it must be a list of pairs"),
        ((META, {"t": 0, "in": 64, "out": 1, "b": [1, -1]}), "line 2: a number of ids in b is -1"),
        ((META, {"t": 0, "in": 64, "out": 1.5, "b": [1, 1]}), "line 2: out is 1.5; it must be a whole number"),
        ((META, {"t": 0, "in": 0, "out": 1, "b": []}), "line 2: in is 0; it must be a whole number, at least 1"),
        ((META, {"t": "x", "in": 64, "out": 1, "b": [1, 1]}), 'line 2: t is "x"; it must be a number of milli'),
        ((META, {"t": 0, "in": 200, "out": 1, "b": [1, 2]}), "200 input tokens are 3 whole blocks of 64, but only 2"),
        ((META, {"t": -5, "in": 64, "out": 1, "b": [1, 1]}), "a request arrives at -0.005 s"),
        (({"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 3},), "hash_ids is 3"),
        (({"meta": {"block": 64, "scope": "session"}},), "local to each session"),
        (({"meta": {"block": 0}},), "meta.block is 0"),
        (({"meta": 5},), "line 1: meta is 5"),
        (({"messages": []},), 'not {"messages": []}'),
    ],
)
def test_what_is_no_trace(tmp_path: Path, lines: tuple[object, ...], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(_written(tmp_path, *lines))
    assert told in str(caught.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 100)[:-20])
    for path in (tmp_path / "absent.jsonl", tmp_path / "cut.gz", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read as a trace"):
            read_trace(path)
