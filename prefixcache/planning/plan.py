"""A plan: how much KV one worker holds, and how context trades against requests at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixcache.planning.kv_layout import KVLayout
from prefixcache.types import CacheGeometry

_FIRST_CONTEXT = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRow:
    """What one length of context costs, and how many requests of it fit into one worker."""

    context_tokens: int
    num_blocks: int
    kv_bytes: int
    num_requests: int
    num_requests_sharing: int | None
    """With the shared prefix in all of them, kept once; None where there is none, or the context is no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One worker's memory."""

    layout: KVLayout
    element_bytes: int
    max_positions: int
    num_blocks: int
    weights_bytes: int | None
    """None where the weights are not at hand."""
    memory_bytes: int | None
    """All that the worker may take; None where nobody said."""
    geometry: CacheGeometry = field(default_factory=CacheGeometry)

    @property
    def bytes_per_token(self) -> int:
        return self.layout.bytes_per_token(self.element_bytes)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.geometry.block_size

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.geometry.block_size

    @property
    def longest_tokens(self) -> int:
        """The longest sequence, prompt and answer, that the worker will take."""
        return min(self.max_positions, self.num_tokens)

    @property
    def left_bytes(self) -> int | None:
        """What of the worker's memory neither KV nor weights take (without known weights: what is left for them)."""
        return None if self.memory_bytes is None else self.memory_bytes - self.kv_bytes - (self.weights_bytes or 0)

    def row(self, context_tokens: int, shared_tokens: int) -> ContextRow:
        """Requests whose prompt and answer have `context_tokens`, the first `shared_tokens` equal in all of them."""
        blocks = -(-context_tokens // self.geometry.block_size)
        shared = shared_tokens // self.geometry.block_size
        own = blocks - shared
        return ContextRow(
            context_tokens=context_tokens,
            num_blocks=blocks,
            kv_bytes=blocks * self.bytes_per_block,
            num_requests=self.num_blocks // blocks,
            num_requests_sharing=max(self.num_blocks - shared, 0) // own
            if 0 < shared_tokens < context_tokens
            else None,
        )

    def contexts(self, asked_tokens: int) -> list[int]:
        """Lengths for a table: powers of two from 1,024 on, the one asked for, and the model's longest."""
        powers = []
        length = _FIRST_CONTEXT
        while length < self.max_positions:
            powers.append(length)
            length *= 2
        return sorted({*powers, asked_tokens, self.max_positions})
