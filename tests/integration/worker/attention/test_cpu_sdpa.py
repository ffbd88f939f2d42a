"""CpuSdpa against attention written out key by key."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.seeds import seeded
from worker.attention.backend import AttentionCall
from worker.attention.cpu_sdpa import CpuSdpa
from worker.attention.step_layout import StepLayout
from worker.kv_cache import KVCache, KVShape, LayerShape
from worker.runner import StepShare

BLOCK_SIZE = 4
NUM_BLOCKS = 32
NUM_HEADS = 6


def _call(
    *, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, scaling: float = 0.3
) -> AttentionCall:
    return AttentionCall(layer=0, scaling=scaling, sliding_window=window, softcap=softcap, sinks=sinks)


def _attend_to(call: AttentionCall, query: Tensor, position: int, keys: Tensor, values: Tensor) -> Tensor:
    """The truth for one row: query [heads, dim] over keys and values [kv_heads, keys, dim] -> [heads, value_dim]."""
    out = []
    for head, row in enumerate(query.double()):
        kv_head = head * len(keys) // NUM_HEADS
        weights: list[Tensor] = []
        for place in range(position + 1):
            score = row @ keys[kv_head, place].double() * call.scaling
            if call.softcap is not None:
                score = call.softcap * torch.tanh(score / call.softcap)
            out_of_sight = call.sliding_window is not None and place <= position - call.sliding_window
            weights.append(torch.zeros(()) if out_of_sight else score.exp())
        total = sum(weights) + (0 if call.sinks is None else math.exp(call.sinks[head]))
        out.append(sum(weight * values[kv_head, place].double() for place, weight in enumerate(weights)) / total)
    return torch.stack([torch.as_tensor(row) for row in out])


def _shares(source: random.Random, spans: Sequence[tuple[int, int]]) -> list[StepShare]:
    """One share a (start, end), in blocks of its own."""
    free = source.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    shares = []
    for start, end in spans:
        table = [free.pop() for _ in range(-(-end // BLOCK_SIZE))]
        shares.append(StepShare(token_ids=[0] * (end - start), start=start, block_table=table, sample=None))
    return shares


def _largest_difference(call: AttentionCall, shape: LayerShape, spans: Sequence[tuple[int, int]]) -> float:
    source = seeded("cpu_sdpa")
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    cache = KVCache(KVShape(layers={0: shape}, dtype=torch.float32, block_size=BLOCK_SIZE), NUM_BLOCKS)
    for layer in cache.layers.values():
        layer.keys.fill_(math.nan)
        layer.values.fill_(math.nan)
    backend = CpuSdpa(cache)
    tensors = [
        (
            torch.randn(shape.num_kv_heads, end, shape.key_dim, generator=generator),
            torch.randn(shape.num_kv_heads, end, shape.value_dim, generator=generator),
            torch.randn(NUM_HEADS, end, shape.key_dim, generator=generator),
        )
        for _, end in spans
    ]
    shares = _shares(source, spans)
    for share, (keys, values, queries) in zip(shares, tensors, strict=True):
        if share.start:  # what an earlier step left in the cache
            earlier = StepShare(token_ids=[0] * share.start, start=0, block_table=share.block_table, sample=None)
            step = StepLayout.pack([earlier], BLOCK_SIZE)
            backend.attend(call, step, *(rows[None, :, : share.start] for rows in (queries, keys, values)))
    step = StepLayout.pack(shares, BLOCK_SIZE)
    packed = [
        torch.cat([rows[:, start:end] for rows, (start, end) in zip(column, spans, strict=True)], dim=1)[None]
        for column in zip(*tensors, strict=True)
    ]
    keys, values, queries = packed
    out = backend.attend(call, step, queries, keys, values)
    assert out.shape == (1, len(step.positions), NUM_HEADS, shape.value_dim)
    expected = [
        _attend_to(call, queries[:, position], position, keys, values)
        for (keys, values, queries), (start, end) in zip(tensors, spans, strict=True)
        for position in range(start, end)
    ]
    return float((out[0] - torch.stack(expected)).abs().max())


@pytest.mark.parametrize(
    "call",
    [
        _call(),
        _call(scaling=1.0),
        _call(window=1),
        _call(window=5),
        _call(softcap=2.0),
        _call(sinks=torch.linspace(-2, 2, NUM_HEADS)),
        _call(window=3, softcap=1.5, sinks=torch.linspace(0, 1, NUM_HEADS)),
    ],
    ids=["plain", "scaling", "window-1", "window-5", "softcap", "sinks", "all"],
)
@pytest.mark.parametrize(
    "shape",
    [LayerShape(num_kv_heads=2, key_dim=8, value_dim=8), LayerShape(num_kv_heads=6, key_dim=8, value_dim=5)],
    ids=["grouped", "narrow-values"],
)
def test_every_row_attends_to_its_own_keys(call: AttentionCall, shape: LayerShape) -> None:
    spans = [(0, 7), (9, 10), (6, 11), (0, 1), (4, 5), (8, 12)]
    assert _largest_difference(call, shape, spans) < 1e-5


def test_a_step_may_hold_one_row_only() -> None:
    shape = LayerShape(num_kv_heads=1, key_dim=8, value_dim=8)
    assert _largest_difference(_call(), shape, [(13, 14)]) < 1e-5
