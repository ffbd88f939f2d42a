"""Values shared by proxy, worker and core; no third-party import."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

KV_BLOCK_SIZE = 16
"""Tokens of one KV block in the own worker."""

INDEX_STRIDE = 4
"""KV blocks of one index block: 64 tokens (16-token granularity costs 4x for no better routing)."""

INDEX_BLOCK_BYTES = 256
"""Index block of a plain engine whose tokenizer is not known: about 64 tokens of English."""

Unit = Literal["token", "byte"]
"""What the prompt of a plain engine is measured in: token ids, or bytes where its tokenizer is not known."""

TOKEN_BYTES = 4
"""Of a packed id."""

if sys.byteorder != "little" or array("I").itemsize != TOKEN_BYTES:
    raise ImportError("prefixcache packs token ids as u32 little-endian and runs on little-endian hosts only")


def pack_tokens(ids: Iterable[int]) -> bytes:
    """u32 little-endian bytes of token ids: what is hashed, compared and carried by protocol v1."""
    return array("I", ids).tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """The ids behind `pack_tokens`. Raises ValueError unless the length is a multiple of four bytes."""
    ids = array("I")
    ids.frombytes(packed)
    return ids


def num_common_tokens(packed: bytes, other: bytes) -> int:
    """With how many equal ids both begin."""
    size = min(len(packed), len(other))
    return next((place for place in range(size) if packed[place] != other[place]), size) // TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """How tokens map to KV blocks and KV blocks to index blocks."""

    block_size: int = KV_BLOCK_SIZE
    stride: int = INDEX_STRIDE

    @property
    def index_block_tokens(self) -> int:
        return self.block_size * self.stride

    def reusable_tokens(self, prompt_tokens: int) -> int:
        """The most tokens of a prompt whose KV can be reused: whole blocks, and one token is always computed."""
        return max(prompt_tokens - 1, 0) // self.block_size * self.block_size

    def predicted_hit_tokens(self, matched_index_blocks: int, prompt_tokens: int) -> int:
        """Tokens that a worker with this match is expected to reuse."""
        return min(matched_index_blocks * self.index_block_tokens, self.reusable_tokens(prompt_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGeometry:
    """How the prompt of a plain engine maps to index blocks, and these to the tokens that the engine may reuse."""

    unit: Unit
    block_size: int = KV_BLOCK_SIZE
    """Tokens of one KV block in the engine."""

    @property
    def index_block_units(self) -> int:
        if self.unit == "byte":
            return INDEX_BLOCK_BYTES
        return max(KV_BLOCK_SIZE * INDEX_STRIDE, self.block_size)

    @property
    def index_block_bytes(self) -> int:
        """Bytes of `EnginePrompt.units` behind one index hash."""
        return self.index_block_units * (TOKEN_BYTES if self.unit == "token" else 1)

    def predicted_hit_tokens(self, matched_index_blocks: int, prompt_tokens: int, *, tokens_per_unit: float) -> int:
        """Tokens that an engine with this match should reuse: whole blocks, and one token is always computed."""
        matched = int(matched_index_blocks * self.index_block_units * tokens_per_unit)
        return min(matched, max(prompt_tokens - 1, 0)) // self.block_size * self.block_size
