"""Prompts for a trace that has none: token ids made from its blocks, equal where those are equal and only there."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from prefixcache.simulation.trace import TraceRequest

MOST_BLOCKS_KEPT = 65_536
"""Texts of blocks that are remembered: 1.8 KB each for 512 tokens."""


def prompt_json(request: TraceRequest, number: int, block_tokens: int) -> str:
    """The prompt as a JSON list of ids 0..255; what goes beyond its whole blocks no other `number` has."""
    parts = [_ids(f"block {block}", block_tokens) for block in request.blocks]
    rest = request.prompt_tokens - block_tokens * len(request.blocks)
    if rest:
        parts.append(_drawn(f"rest {number}", rest))
    return f"[{','.join(parts)}]"


@lru_cache(maxsize=MOST_BLOCKS_KEPT)
def _ids(name: str, num_ids: int) -> str:
    return _drawn(name, num_ids)


def _drawn(name: str, num_ids: int) -> str:
    return ",".join(map(str, hashlib.shake_128(name.encode()).digest(num_ids)))
