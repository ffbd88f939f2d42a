"""Attention with its scores made by hand, for what SDPA cannot do: softcapped scores and attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.backend import AttentionCall


def attend_by_scores(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """query [num_heads, rows, key_dim], key and value [num_kv_heads, keys, dim], mask [rows, keys] to be added
    -> [num_heads, rows, value_dim]. Scores in float32, one KV head at a time: rows * keys * heads / kv_heads floats.
    """
    num_heads, rows, _ = query.shape
    num_kv_heads, keys, value_dim = value.shape
    group = num_heads // num_kv_heads
    out = query.new_empty(num_heads, rows, value_dim)
    for head in range(num_kv_heads):
        heads = slice(head * group, (head + 1) * group)
        scores = (query[heads] @ key[head].T).float() * call.scaling  # [group, rows, keys]
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = scores + mask
        if call.sinks is not None:
            sinks = call.sinks[heads].float().view(group, 1, 1).expand(group, rows, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., :keys]
        out[heads] = weights.to(value.dtype) @ value[head]
    return out
