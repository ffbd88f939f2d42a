"""Traces for these tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from prefixcache.simulation.trace import Trace, TraceRequest
from prefixcache.simulation.trace_files import read_trace

_DATA = Path(__file__).parent / "data"
CHATS_FILE = _DATA / "mooncake_conversation_part.jsonl"
CODING_FILE = _DATA / "coding_part.jsonl"
BLOCK = 512


def chats() -> Trace:
    return read_trace(CHATS_FILE)


def coding() -> Trace:
    return read_trace(CODING_FILE)


def request(
    blocks: Sequence[int],
    *,
    at: float = 0.0,
    rest: int = 100,
    output: int = 10,
    session: int | None = None,
    think_s: float = 0.0,
) -> TraceRequest:
    """A prompt of these whole blocks and `rest` tokens more."""
    prompt_tokens = len(blocks) * BLOCK + rest
    return TraceRequest(
        arrival_s=at,
        prompt_tokens=prompt_tokens,
        output_tokens=output,
        blocks=tuple(blocks),
        reusable_blocks=min((prompt_tokens - 1) // BLOCK, len(blocks)),
        session=session,
        think_s=think_s,
    )


def trace(*requests: TraceRequest) -> Trace:
    return Trace(name="made", block_tokens=BLOCK, requests=requests)


def chains(chance: random.Random, count: int, *, longest: int) -> list[tuple[int, ...]]:
    """Chains of blocks that grow out of each other; a block is named after all before it, as in traces."""
    names: dict[tuple[int, ...], int] = {}
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        words = [chance.randrange(3) for _ in range(chance.randint(1, longest))]
        prefixes = [tuple(words[:length]) for length in range(1, len(words) + 1)]
        made.append(tuple(names.setdefault(prefix, len(names)) for prefix in prefixes))
    return made
