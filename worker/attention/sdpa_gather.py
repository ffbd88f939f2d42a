"""Attention written out: the reference that other backends are held to, and what serves where they cannot.

Every sequence's keys are gathered whole and its scores are made by hand in float32, on whatever device the cache is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.backend import AttentionCall
from worker.attention.step_layout import SequenceRows, StepLayout
from worker.kv_cache import KVCache


class SdpaGather:
    """AttentionBackend that serves every call, dtype and device."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def attend(self, call: AttentionCall, step: StepLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = self._cache.layers[call.layer]
        num_rows = step.num_rows
        layer.write(step.slots, key[0, :, :num_rows].transpose(0, 1), value[0, :, :num_rows].transpose(0, 1))
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        for sequence in step.sequences:
            keys, values = layer.gather(sequence.blocks.to(self._cache.device))
            out[0, sequence.rows] = attend_plainly(
                call,
                query[0, :, sequence.rows],
                keys[: sequence.end].transpose(0, 1),
                values[: sequence.end].transpose(0, 1),
                hidden_keys(sequence, call.sliding_window).to(self._cache.device),
            ).transpose(0, 1)
        return out


def hidden_keys(sequence: SequenceRows, sliding_window: int | None) -> Tensor:
    """[num_rows, end]: True where the row may not attend to the key."""
    queries = torch.arange(sequence.start, sequence.end).unsqueeze(1)
    keys = torch.arange(sequence.end)
    hidden = keys > queries
    return hidden if sliding_window is None else hidden | (keys <= queries - sliding_window)


def attend_plainly(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """query [num_heads, rows, key_dim], key and value [num_kv_heads, keys, dim], hidden [rows, keys]
    -> [num_heads, rows, value_dim]. Costs 4 bytes * num_heads * rows * keys for the scores, several times over.
    """
    group = query.shape[0] // key.shape[0]
    keys, values = (rows.float().repeat_interleave(group, dim=0) for rows in (key, value))
    scores = query.float() @ keys.transpose(1, 2) * call.scaling  # [num_heads, rows, keys]
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[1]]
    return (weights @ values).to(query.dtype)
