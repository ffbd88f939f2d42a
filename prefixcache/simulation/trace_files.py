"""Reads traces, plain or gzipped, one JSON value a line.

compact    {"meta": {"block": 512, ...}} first, then {"t": ms, "in": tokens, "out": tokens, "b": [first, count, ...]}
           with runs of consecutive block ids; "s" and "th" (ms) name a session and its think time
Mooncake   {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}, blocks of 512 tokens
lengths    {"meta": ...}, then [ms, input tokens, output tokens]: prompts that share nothing

The ids of compact and Mooncake traces are chained: an equal id means an equal prefix up to there.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixcache.errors import ConfigError
from prefixcache.simulation.trace import Trace, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
"""FAST25-release/traces of kvcache-ai/Mooncake."""
LENGTHS_BLOCK_TOKENS = 512
_GZIP_MAGIC = b"\x1f\x8b"


def read_trace(path: Path) -> Trace:
    """Raises ConfigError, with the line, for what is no trace."""
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    block_tokens: int | None = None
    requests: list[TraceRequest] = []
    for number, value in _values(path):
        try:
            if isinstance(value, dict) and "meta" in value:
                block_tokens = _block_tokens(value["meta"])
                continue
            read = _reader(value)
            if read is _compact and block_tokens is None:
                raise ValueError('the first line must be {"meta": {"block": tokens of a block}}')
            requests.append(read(value, block_tokens or MOONCAKE_BLOCK_TOKENS, number))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {number}: {_told(error)}") from error
    if not requests:
        raise ConfigError(f"{path} has no requests: expected one JSON value a line, see docs/simulate.md")
    first_s = min(request.arrival_s for request in requests)
    if first_s < 0:
        raise ConfigError(f"{path}: a request arrives at {first_s} s; times count from the beginning of the trace")
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(name=name, block_tokens=block_tokens or MOONCAKE_BLOCK_TOKENS, requests=requests)


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number} is no JSON: {error}") from error


def _block_tokens(meta: object) -> int | None:
    if not isinstance(meta, dict):
        raise ValueError(f"meta is {json.dumps(meta)[:80]}; it must be an object")
    if meta.get("scope") == "session":
        raise ValueError(
            "block ids of this trace are local to each session, so nothing in it arrives: compose the sessions to one "
            "trace first"
        )
    block_tokens = meta.get("block")
    return None if block_tokens is None else _count(block_tokens, "meta.block", least=1)


def _reader(value: object) -> Callable[[Any, int, int], TraceRequest]:
    if isinstance(value, list) and len(value) == 3:
        return _lengths
    if isinstance(value, dict) and "hash_ids" in value:
        return _mooncake
    if isinstance(value, dict) and "b" in value:
        return _compact
    raise ValueError(
        'expected {"t", "in", "out", "b"}, Mooncake\'s {"timestamp", "input_length", "output_length", "hash_ids"} '
        f"or [ms, input tokens, output tokens], not {json.dumps(value)[:80]}"
    )


def _compact(value: Mapping[str, Any], block_tokens: int, _number: int) -> TraceRequest:
    runs = value["b"]
    if not isinstance(runs, list) or len(runs) % 2:
        raise ValueError(f"b is {json.dumps(runs)[:80]}; it must be a list of pairs: first id, number of ids")
    blocks: list[int] = []
    for first, length in zip(runs[::2], runs[1::2], strict=True):
        first = _count(first, "an id in b")
        blocks.extend(range(first, first + _count(length, "a number of ids in b")))
    return _request(
        arrival_s=_number_of(value["t"], "t") / 1000,
        prompt_tokens=_count(value["in"], "in", least=1),
        output_tokens=_count(value["out"], "out"),
        blocks=blocks,
        block_tokens=block_tokens,
        session=None if value.get("s") is None else _count(value["s"], "s"),
        think_s=_number_of(value.get("th", 0), "th") / 1000,
    )


def _mooncake(value: Mapping[str, Any], block_tokens: int, _number: int) -> TraceRequest:
    ids = value["hash_ids"]
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids is {json.dumps(ids)[:80]}; it must be a list of block ids")
    return _request(
        arrival_s=_number_of(value["timestamp"], "timestamp") / 1000,
        prompt_tokens=_count(value["input_length"], "input_length", least=1),
        output_tokens=_count(value["output_length"], "output_length"),
        blocks=[_count(block, "an id in hash_ids") for block in ids],
        block_tokens=block_tokens,
    )


def _lengths(value: Sequence[Any], block_tokens: int, number: int) -> TraceRequest:
    """Every prompt has blocks of its own: its line in the upper bits, the block's place below."""
    prompt_tokens = _count(value[1], "the number of input tokens", least=1)
    own = number << 32
    return _request(
        arrival_s=_number_of(value[0], "the time") / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=_count(value[2], "the number of output tokens"),
        blocks=range(own, own + prompt_tokens // block_tokens),
        block_tokens=block_tokens,
    )


def _request(
    *,
    arrival_s: float,
    prompt_tokens: int,
    output_tokens: int,
    blocks: Sequence[int],
    block_tokens: int,
    session: int | None = None,
    think_s: float = 0.0,
) -> TraceRequest:
    """The last block of a prompt may be partial: it is in no cache."""
    whole = tuple(blocks[: prompt_tokens // block_tokens])
    if len(whole) < prompt_tokens // block_tokens:
        raise ValueError(
            f"{prompt_tokens} input tokens are {prompt_tokens // block_tokens} whole blocks of {block_tokens}, "
            f"but only {len(blocks)} ids are given"
        )
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=whole,
        reusable_blocks=min((prompt_tokens - 1) // block_tokens, len(whole)),
        session=session,
        think_s=max(think_s, 0.0),
    )


def _count(value: object, what: str, *, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is {json.dumps(value)[:80]}; it must be a whole number, at least {least}")
    return value


def _number_of(value: object, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) > 1e15:
        raise ValueError(f"{what} is {json.dumps(value)[:80]}; it must be a number of milliseconds")
    return float(value)


def _told(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
