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
    cache = LruBlocks(capacity_blocks=capacity_blocks, block_tokens=block_tokens)
    return _replayed_hit_rate(prefills, [cache] * len(prefills))


def partitioned_hit_rate(
    prefills: Sequence[Prefill], *, num_engines: int, capacity_blocks: int, block_tokens: int
) -> float:
    """If every chat had stayed on one engine, in the same order: as many chats on each, those of one system prompt
    side by side. What routing could reach that knew all chats beforehand and nothing of load.
    """
    chats = _chats(prefills)
    ordered = sorted(set(chats))
    place = {chat: number * num_engines // len(ordered) for number, chat in enumerate(ordered)}
    caches = [LruBlocks(capacity_blocks=capacity_blocks, block_tokens=block_tokens) for _ in range(num_engines)]
    return _replayed_hit_rate(prefills, [caches[place[chat]] for chat in chats])


def _replayed_hit_rate(prefills: Sequence[Prefill], caches: Sequence[LruBlocks]) -> float:
    """If each had been served by the cache beside it."""
    cached_tokens = 0
    for prefill, cache in zip(prefills, caches, strict=True):
        cached_tokens += cache.cached_tokens(prefill.blocks, prefill.num_tokens)
        cache.hold(prefill.blocks)
    return cached_tokens / sum(prefill.num_tokens for prefill in prefills)


def _chats(prefills: Sequence[Prefill]) -> list[tuple[int, int]]:
    """Of each the first block, which its system prompt tells apart, and the place at which its chat began.

    A prompt that holds all of an earlier one and its answer goes on with that chat.
    """
    chats: list[tuple[int, int]] = []
    ends: dict[int, tuple[int, int]] = {}
    for number, prefill in enumerate(prefills):
        before = next((ends[block] for block in reversed(prefill.blocks) if block in ends), None)
        chats.append((prefill.blocks[0], number) if before is None else before)
        ends[prefill.blocks[-1]] = chats[-1]
    return chats


def imbalance(prefills: Sequence[Prefill], num_engines: int) -> float:
    """Requests of the busiest engine over the mean of all."""
    [(_, most)] = Counter(prefill.worker for prefill in prefills).most_common(1)
    return most * num_engines / len(prefills)
