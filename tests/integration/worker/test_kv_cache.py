"""Sizes of the KV cache, and that rows come back from where they were put."""

from __future__ import annotations

import pytest
import torch

from prefixcache.errors import ConfigError
from worker.kv_cache import KVCache, KVShape, LayerShape, blocks_of_heads, fit_blocks, of_every_head

SHAPE = KVShape(
    layers={
        0: LayerShape(num_kv_heads=3, key_dim=64, value_dim=64),
        1: LayerShape(num_kv_heads=2, key_dim=24, value_dim=16),
    },
    dtype=torch.bfloat16,
    block_size=16,
)
BYTES_PER_TOKEN = 2 * (3 * 128 + 2 * 40)
BYTES_PER_BLOCK = 16 * BYTES_PER_TOKEN


def test_bytes_of_a_token_and_a_block() -> None:
    assert SHAPE.bytes_per_token == BYTES_PER_TOKEN
    assert SHAPE.bytes_per_block == BYTES_PER_BLOCK


def test_memory_gives_whole_blocks() -> None:
    memory = 10 * BYTES_PER_BLOCK + BYTES_PER_BLOCK - 1
    assert fit_blocks(SHAPE, num_blocks=None, kv_memory_bytes=memory, required_tokens=None) == 10
    assert fit_blocks(SHAPE, num_blocks=None, kv_memory_bytes=memory, required_tokens=160) == 10


def test_num_blocks_goes_before_memory() -> None:
    assert fit_blocks(SHAPE, num_blocks=3, kv_memory_bytes=0, required_tokens=48) == 3


def test_memory_below_one_block_is_refused_with_the_need() -> None:
    with pytest.raises(ConfigError, match=rf"too few for one block of 16 tokens.*{BYTES_PER_BLOCK:,} bytes"):
        fit_blocks(SHAPE, num_blocks=None, kv_memory_bytes=BYTES_PER_BLOCK - 1, required_tokens=None)


def test_memory_below_one_sequence_is_refused_with_the_need() -> None:
    with pytest.raises(ConfigError, match=rf"hold 160 tokens.*may have 161.*11 blocks \({11 * BYTES_PER_BLOCK:,} b"):
        fit_blocks(SHAPE, num_blocks=None, kv_memory_bytes=10 * BYTES_PER_BLOCK, required_tokens=161)
    with pytest.raises(ConfigError, match=r"3 KV blocks hold 48 tokens.*may have 49"):
        fit_blocks(SHAPE, num_blocks=3, kv_memory_bytes=0, required_tokens=49)


def test_memory_the_system_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="which this machine refuses"):
        KVCache(SHAPE, 2**45)


def test_a_copy_puts_the_first_rows_of_a_block_into_another_in_all_layers() -> None:
    cache = KVCache(SHAPE, 3)
    for layer in cache.layers.values():
        for pool in (layer.keys, layer.values):
            pool.copy_(torch.arange(pool.numel()).view(pool.shape) % 251)
    before = {index: (layer.keys.clone(), layer.values.clone()) for index, layer in cache.layers.items()}
    cache.copy(2, 0, 5)
    for index, layer in cache.layers.items():
        for pool, was in zip((layer.keys, layer.values), before[index], strict=True):
            assert torch.equal(pool[0, :5], was[2, :5])
            assert torch.equal(pool[0, 5:], was[0, 5:])
            assert torch.equal(pool[1:], was[1:])


def test_rows_come_back_in_the_order_of_the_blocks() -> None:
    cache = KVCache(SHAPE, 4)
    keys = torch.arange(20 * 2 * 24).view(20, 2, 24).to(torch.bfloat16)
    values = -torch.arange(20 * 2 * 16).view(20, 2, 16).to(torch.bfloat16)
    table = [3, 1]
    slots = torch.tensor([table[position // 16] * 16 + position % 16 for position in range(20)])
    layer = cache.layers[1]
    layer.write(slots, keys, values)
    gathered_keys, gathered_values = layer.gather(torch.tensor(table))
    assert gathered_keys.shape == (32, 2, 24)
    assert gathered_values.shape == (32, 2, 16)
    assert torch.equal(gathered_keys[:20], keys)
    assert torch.equal(gathered_values[:20], values)
    assert torch.equal(layer.keys[3], keys[:16])


def test_blocks_of_a_head_stand_together_in_main_memory() -> None:
    """So that they are seen through another shape and not copied."""
    cache = KVCache(SHAPE, 5)
    pool = cache.layers[0].keys
    of_heads = blocks_of_heads(pool)
    assert of_heads.is_contiguous()
    assert of_heads.data_ptr() == pool.data_ptr()
    pool.copy_(torch.arange(5 * 16 * 3).view(5, 16, 3, 1).expand(pool.shape))
    places = of_every_head(torch.tensor([4, 1]), 3, 5)
    assert places.tolist() == [[4, 1], [9, 6], [14, 11]]
    for head in range(3):
        assert torch.equal(of_heads[places[head]], pool[[4, 1], :, head])
