"""torch's `varlen_attn` in plain maths, for machines without CUDA: the same signature, the same meaning."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Checks what the kernel would check, then attends; rows are aligned with the ends of their keys."""
    assert return_aux is None and num_splits is None, "not stood in for"
    assert query.dim() == 3 and query.stride(-1) == 1 and key.stride(-1) == 1 and value.stride(-1) == 1
    assert cu_seq_q.dtype == torch.int32
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "the kernel has one head dim"
    rows = cu_seq_q.tolist()
    assert rows[0] == 0 and rows[-1] == len(query), "every row belongs to a sequence"
    keys = _keys(key, value, cu_seq_k, seqused_k, block_table)
    assert len(keys) == len(rows) - 1
    counts = [end - start for start, end in pairwise(rows)]
    assert max(counts) == max_q and max(len(key) for key, _ in keys) == max_k
    out = torch.empty_like(query)
    for start, count, (own_keys, own_values) in zip(rows, counts, keys, strict=False):
        mine = slice(start, start + count)
        out[mine] = _attend(
            query[mine], own_keys, own_values, query.shape[-1] ** -0.5 if scale is None else scale, window_size
        )
    return out


def _keys(
    key: Tensor, value: Tensor, cu_seq_k: Tensor | None, seqused_k: Tensor | None, block_table: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Each sequence's K and V, [keys, num_kv_heads, dim]."""
    if block_table is None:
        assert cu_seq_k is not None and seqused_k is None and key.dim() == 3 and cu_seq_k.dtype == torch.int32
        starts = cu_seq_k.tolist()
        assert starts[0] == 0 and starts[-1] == len(key)
        return [(key[start:end], value[start:end]) for start, end in pairwise(starts)]
    assert cu_seq_k is None and seqused_k is not None and key.dim() == 4
    assert block_table.dtype == seqused_k.dtype == torch.int32 and block_table.is_contiguous()
    return [
        (key[table.long()].flatten(0, 1)[:used], value[table.long()].flatten(0, 1)[:used])
        for table, used in zip(block_table, seqused_k.tolist(), strict=True)
    ]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window_size: tuple[int, int]) -> Tensor:
    """query [rows, num_heads, dim], key and value [keys, num_kv_heads, dim] -> [rows, num_heads, dim]."""
    left, right = window_size
    group = query.shape[1] // key.shape[1]
    places = torch.arange(len(query)).unsqueeze(1) + len(key) - len(query)
    distances = torch.arange(len(key)) - places  # of a key from its row, [rows, keys]
    hidden = torch.zeros_like(distances, dtype=torch.bool)
    if right >= 0:
        hidden |= distances > right
    if left >= 0:
        hidden |= distances < -left
    keys, values = (rows.double().repeat_interleave(group, dim=1) for rows in (key, value))
    scores = torch.einsum("rhd,khd->hrk", query.double(), keys) * scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hrk,khd->rhd", weights, values).to(query.dtype)
