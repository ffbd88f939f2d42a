"""Attention on the CPU, one sequence at a time.

    bfloat16             by tiles of rows (worker/attention/tiles.py)
    float32, by torch's scaled dot product attention:
      fresh prefill      is_causal, K and V as the model just made them: nothing is gathered
      decode             the keys in sight are gathered; the query heads of a KV head become rows, so no mask
      chunk after KV     gathered keys and one float mask, shared by all layers of the step

K and V are never repeated for grouped query heads (measured: 2.1 to 2.5 times slower). Keys out of sight of a sliding
window are not gathered.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.attention.backend import AttentionCall
from worker.attention.scores import attend_by_scores
from worker.attention.step_layout import SequenceRows, StepLayout
from worker.attention.tiles import TileAttention
from worker.kv_cache import KVCache, LayerCache


class CpuSdpa:
    """AttentionBackend over a KVCache in main memory."""

    def __init__(self, cache: KVCache, wide_layers: Collection[int] = ()) -> None:
        """Scores of `wide_layers` are kept in float32."""
        self._cache = cache
        self._tiles = TileAttention(wide_layers)

    def attend(self, call: AttentionCall, step: StepLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = self._cache.layers[call.layer]
        _, num_heads, num_rows, _ = query.shape
        layer.write(
            step.slots, key[0, :, : step.num_rows].transpose(0, 1), value[0, :, : step.num_rows].transpose(0, 1)
        )
        out = query.new_empty(1, num_rows, num_heads, value.shape[-1])
        out[:, step.num_rows :] = 0
        if query.dtype == torch.bfloat16:
            self._tiles.attend(call, step, layer, query[0], out[0])
            return out
        for sequence in step.sequences:
            rows = sequence.rows
            if sequence.start == 0:
                keys, values = key[:, :, rows], value[:, :, rows]
            else:
                keys, values = _gather(layer, sequence, call.sliding_window, step.block_size)
            out[:, rows] = _attend_one(call, step, sequence, query[:, :, rows], keys, values).transpose(1, 2)
        return out


def _gather(
    layer: LayerCache, sequence: SequenceRows, sliding_window: int | None, block_size: int
) -> tuple[Tensor, Tensor]:
    """K and V of the keys that the sequence's rows can see, [1, num_kv_heads, end - first_key, dim]."""
    first_key = sequence.first_key(sliding_window)
    first_block = first_key // block_size
    keys, values = layer.gather(sequence.blocks[first_block:])
    seen = slice(first_key - first_block * block_size, sequence.end - first_block * block_size)
    return keys[seen].transpose(0, 1).unsqueeze(0), values[seen].transpose(0, 1).unsqueeze(0)


def _attend_one(
    call: AttentionCall, step: StepLayout, sequence: SequenceRows, query: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """[1, num_heads, rows, key_dim] over [1, num_kv_heads, keys, dim] -> [1, num_heads, rows, value_dim]."""
    _, num_heads, num_rows, key_dim = query.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    if call.softcap is not None or call.sinks is not None:
        hidden = step.hidden(num_keys - num_rows, num_rows, 0, num_keys, call.sliding_window)
        return attend_by_scores(call, query[0], keys[0], values[0], hidden).unsqueeze(0)
    if num_rows == 1:
        grouped = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, key_dim)
        return scaled_dot_product_attention(grouped, keys, values, scale=call.scaling).view(1, num_heads, 1, -1)
    if sequence.start == 0 and sequence.masks_by_causality_alone(call.sliding_window):
        return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=call.scaling, enable_gqa=True)
    mask = step.mask(num_keys - num_rows, num_rows, call.sliding_window, query.dtype)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=call.scaling, enable_gqa=True)
