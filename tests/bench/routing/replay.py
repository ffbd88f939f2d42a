"""What one run's requests would have found in other caches, and what they did find."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.support.lru_blocks import LruBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One line of the engines' log; in the order in which the prefills began."""

    worker: str
    num_tokens: int
    cached_tokens: int
    blocks: Sequence[int]
    """Names of the blocks of prompt and answer."""


def read_prefills(lines: Iterable[str]) -> list[Prefill]:
    rows = [json.loads(line) for line in lines]
    return [
        Prefill(worker=row["worker"], num_tokens=row["n"], cached_tokens=row["cached"], blocks=tuple(row["blocks"]))
        for row in rows
    ]


def hit_rate(prefills: Sequence[Prefill]) -> float:
    """Cached tokens per prompt token."""
    return sum(prefill.cached_tokens for prefill in prefills) / sum(prefill.num_tokens for prefill in prefills)


def pooled_hit_rate(prefills: Sequence[Prefill], *, capacity_blocks: int | None, block_tokens: int) -> float:
    """If one cache of this capacity had served all of them, in the same order; None is an infinite one: the bound."""
    blocks = LruBlocks(capacity_blocks=capacity_blocks, block_tokens=block_tokens)
    cached_tokens = 0
    for prefill in prefills:
        cached_tokens += blocks.cached_tokens(prefill.blocks, prefill.num_tokens)
        blocks.hold(prefill.blocks)
    return cached_tokens / sum(prefill.num_tokens for prefill in prefills)


def imbalance(prefills: Sequence[Prefill], num_engines: int) -> float:
    """Requests of the busiest engine over the mean of all."""
    [(_, most)] = Counter(prefill.worker for prefill in prefills).most_common(1)
    return most * num_engines / len(prefills)
