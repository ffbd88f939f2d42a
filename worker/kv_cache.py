"""The KV cache: K and V tensors of every layer, cut into blocks.

    keys of one layer    [num_blocks, block_size, num_kv_heads, key_dim]
    values of one layer  [num_blocks, block_size, num_kv_heads, value_dim]

    position p of a sequence stands in slot  block_table[p // block_size] * block_size + p % block_size

K and V are two tensors because some families give them different head dims, and because paged attention kernels want
each of them contiguous. What stands in which block is the block pool's business.

In main memory the keys of one head stand together, for the products of attention are made head by head; elsewhere those
of one block do. The tensors are indexed alike:

    main memory    [num_kv_heads, num_blocks, block_size, key_dim], seen through a permutation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixcache.errors import ConfigError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one layer keeps of one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What a model keeps of one token, and in which blocks."""

    layers: Mapping[int, LayerShape]
    """By the layer index that the model's own attention modules carry."""
    dtype: torch.dtype
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.num_elements for layer in self.layers.values()) * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


def fit_blocks(shape: KVShape, *, num_blocks: int | None, kv_memory_bytes: int, required_tokens: int | None) -> int:
    """Blocks of the cache: `num_blocks`, else as many as fit into `kv_memory_bytes`.

    Raises ConfigError when that is no block at all, or too few for one sequence of `required_tokens`.
    """
    fitting = kv_memory_bytes // shape.bytes_per_block if num_blocks is None else num_blocks
    needed = 1 if required_tokens is None else -(-required_tokens // shape.block_size)
    if fitting >= max(needed, 1):
        return fitting
    source = f"{kv_memory_bytes:,} bytes of KV memory" if num_blocks is None else f"{num_blocks} KV blocks"
    if required_tokens is None:
        raise ConfigError(
            f"{source} are too few for one block of {shape.block_size} tokens: this model keeps "
            f"{shape.bytes_per_token:,} bytes a token, so give it at least {shape.bytes_per_block:,} bytes"
        )
    raise ConfigError(
        f"{source} hold {max(fitting, 0) * shape.block_size:,} tokens, but one sequence may have {required_tokens:,}: "
        f"give {needed} blocks ({needed * shape.bytes_per_block:,} bytes), or a lower maximum model length"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """K and V of one layer."""

    keys: Tensor  # [num_blocks, block_size, num_kv_heads, key_dim]
    values: Tensor  # [num_blocks, block_size, num_kv_heads, value_dim]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts rows [num_tokens, num_kv_heads, dim] into `slots` [num_tokens]."""
        self.keys.flatten(0, 1).index_copy_(0, slots, keys)
        self.values.flatten(0, 1).index_copy_(0, slots, values)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Puts the first rows of one block into another."""
        for pool in (self.keys, self.values):
            pool[target, :num_tokens] = pool[source, :num_tokens]

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the rows of `blocks` [n], in that order: two tensors [n * block_size, num_kv_heads, dim]."""
        return _gather(self.keys, blocks), _gather(self.values, blocks)

    def gather_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the rows in `slots` [n], in that order: two tensors [n, num_kv_heads, dim]."""
        return self.keys.flatten(0, 1).index_select(0, slots), self.values.flatten(0, 1).index_select(0, slots)


def blocks_of_heads(pool: Tensor) -> Tensor:
    """[num_kv_heads * num_blocks, block_size, dim] of a pool in main memory; block b of head h: h * num_blocks + b."""
    return pool.permute(2, 0, 1, 3).flatten(0, 1)


def of_every_head(blocks: Tensor, num_kv_heads: int, num_blocks: int) -> Tensor:
    """[.., num_kv_heads, n] places of `blocks` [.., n] in blocks_of_heads."""
    return blocks.unsqueeze(-2) + torch.arange(0, num_kv_heads * num_blocks, num_blocks).unsqueeze(1)


def _gather(pool: Tensor, blocks: Tensor) -> Tensor:
    if pool.device.type != "cpu":
        return pool.index_select(0, blocks).flatten(0, 1)
    num_blocks, _, num_kv_heads, dim = pool.shape
    places = of_every_head(blocks, num_kv_heads, num_blocks).flatten()
    return blocks_of_heads(pool).index_select(0, places).view(num_kv_heads, -1, dim).transpose(0, 1)


class KVCache:
    """All layers' K and V, on one device. Main memory is committed by the system as blocks are first written."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device = CPU) -> None:
        """Raises ConfigError when the system refuses the memory."""
        self.shape = shape
        self.device = device
        self.num_blocks = num_blocks
        try:
            self.layers = {index: self._allocate(layer) for index, layer in shape.layers.items()}
        except RuntimeError as error:
            place = "this machine" if device.type == "cpu" else f"the {device.type} device"
            raise ConfigError(
                f"{num_blocks} KV blocks take {num_blocks * shape.bytes_per_block:,} bytes, which {place} "
                f"refuses: give less KV memory ({error})"
            ) from error

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Puts the KV of the first tokens of one block into another, in all layers."""
        for layer in self.layers.values():
            layer.copy(source, target, num_tokens)

    def _allocate(self, layer: LayerShape) -> LayerCache:
        return LayerCache(
            keys=self._tensor(layer.num_kv_heads, layer.key_dim),
            values=self._tensor(layer.num_kv_heads, layer.value_dim),
        )

    def _tensor(self, num_kv_heads: int, dim: int) -> Tensor:
        rows = (self.num_blocks, self.shape.block_size)
        if self.device.type == "cpu":
            return torch.empty(num_kv_heads, *rows, dim, dtype=self.shape.dtype).permute(1, 2, 0, 3)
        return torch.empty(*rows, num_kv_heads, dim, dtype=self.shape.dtype, device=self.device)
