"""Random steps over a KV cache, and what attention must make of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.attention.backend import AttentionBackend, AttentionCall
from worker.attention.step_layout import StepLayout
from worker.kv_cache import KVCache, KVShape, LayerShape
from worker.runner import StepShare

BLOCK_SIZE = 4
NUM_BLOCKS = 96
NUM_HEADS = 6

Span = tuple[int, int]
"""A sequence's share in a step: positions start .. end; what stands before start is in the cache."""


def attention_call(
    *, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, scaling: float = 0.3
) -> AttentionCall:
    return AttentionCall(layer=0, scaling=scaling, sliding_window=window, softcap=softcap, sinks=sinks)


def random_spans(source: random.Random) -> list[Span]:
    """Fresh prefills, chunks after cached KV and decodes in any mixture, of one sequence to eight."""
    spans = []
    for _ in range(source.randint(1, 8)):
        start = source.choice([0, 0, source.randint(1, 30)])
        spans.append((start, start + source.choice([1, 1, source.randint(1, 12)])))
    return spans


def largest_difference(
    make: Callable[[KVCache], AttentionBackend],
    call: AttentionCall,
    shape: LayerShape,
    spans: Sequence[Span],
    source: random.Random,
    *,
    num_padding_rows: int = 0,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Between a backend's rows and the truth, in one step whose earlier KV the same backend wrote, chunk by chunk."""
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    cache = KVCache(KVShape(layers={0: shape}, dtype=dtype, block_size=BLOCK_SIZE), NUM_BLOCKS)
    for layer in cache.layers.values():  # what was never written must not be read
        layer.keys.fill_(math.nan)
        layer.values.fill_(math.nan)
    backend = make(cache)
    sequences = [
        tuple(
            torch.randn(heads, end, dim, generator=generator).to(dtype)
            for heads, dim in (
                (NUM_HEADS, shape.key_dim),
                (shape.num_kv_heads, shape.key_dim),
                (shape.num_kv_heads, shape.value_dim),
            )
        )
        for _, end in spans
    ]
    tables = _block_tables(source, spans)
    for rows, table, (start, _) in zip(sequences, tables, spans, strict=True):
        if start:
            half = source.randint(0, start - 1)
            for earlier in [(0, half), (half, start)] if half else [(0, start)]:
                _attend(backend, call, [rows], [table], [earlier], 0)
    out = _attend(backend, call, sequences, tables, spans, num_padding_rows)
    num_rows = len(out) - num_padding_rows
    assert not out[num_rows:].any(), "rows of nobody are 0"
    expected = [
        truth(call, queries[:, position], position, keys, values)
        for (queries, keys, values), span in zip(sequences, spans, strict=True)
        for position in range(*span)
    ]
    return float((out[:num_rows].double() - torch.stack(expected)).abs().max())


def truth(call: AttentionCall, query: Tensor, position: int, keys: Tensor, values: Tensor) -> Tensor:
    """For one row: query [heads, dim] over keys and values [kv_heads, keys, dim] -> [heads, value_dim] in float64."""
    first = 0 if call.sliding_window is None else max(0, position - call.sliding_window + 1)
    seen = slice(first, position + 1)
    out = []
    for head, row in enumerate(query.double()):
        kv_head = head * len(keys) // len(query)
        scores = keys[kv_head, seen].double() @ row * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if call.sinks is None else math.exp(call.sinks[head]))
        out.append(weights @ values[kv_head, seen].double() / total)
    return torch.stack(out)


def _block_tables(source: random.Random, spans: Sequence[Span]) -> list[list[int]]:
    free = source.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [[free.pop() for _ in range(-(-end // BLOCK_SIZE))] for _, end in spans]


def _attend(
    backend: AttentionBackend,
    call: AttentionCall,
    sequences: Sequence[Sequence[Tensor]],
    tables: Sequence[Sequence[int]],
    spans: Sequence[Span],
    num_padding_rows: int,
) -> Tensor:
    """One step; [rows, heads, value_dim]."""
    shares = [
        StepShare(token_ids=[0] * (end - start), start=start, block_table=table, sample=None)
        for table, (start, end) in zip(tables, spans, strict=True)
    ]
    step = StepLayout.pack(shares, BLOCK_SIZE)
    packed = [
        torch.cat([rows[:, start:end] for rows, (start, end) in zip(column, spans, strict=True)], dim=1)
        for column in zip(*sequences, strict=True)
    ]
    padded = [torch.nn.functional.pad(rows, (0, 0, 0, num_padding_rows), value=9.0)[None] for rows in packed]
    query, key, value = padded
    return backend.attend(call, step, query, key, value)[0]
