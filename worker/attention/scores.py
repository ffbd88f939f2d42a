"""Attention with its scores made by hand in float32: soft caps, attention sinks, and scores too large to be rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.backend import AttentionCall


def attend_by_scores(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """query [num_heads, rows, key_dim], key and value [num_kv_heads, keys, dim], hidden [rows, keys]: True where a row
    may not attend -> [num_heads, rows, value_dim]. One KV head at a time: rows * keys * heads / kv_heads floats, twice.
    """
    num_heads, rows, _ = query.shape
    num_kv_heads, keys, value_dim = value.shape
    group = num_heads // num_kv_heads
    out = query.new_empty(num_heads, rows, value_dim)
    for head in range(num_kv_heads):
        heads = slice(head * group, (head + 1) * group)
        scores = query[heads].float() @ key[head].float().T  # [group, rows, keys]
        scores *= call.scaling
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        scores.masked_fill_(hidden, -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks[heads].float().view(group, 1, 1).expand(group, rows, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., :keys]
        out[heads] = weights.to(value.dtype) @ value[head]
    return out


def largest_score(call: AttentionCall, query: Tensor, key: Tensor) -> float:
    """Of any row and key, before a cap: query [num_heads, rows, key_dim], key [num_kv_heads, keys, key_dim]."""
    keys = key.float().repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    return float((query.float() @ keys.transpose(1, 2)).abs().max()) * call.scaling
