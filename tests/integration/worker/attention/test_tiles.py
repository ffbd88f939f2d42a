"""Attention in bfloat16, in tiles: right for many rows and keys, and the same bits however a sequence is cut."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from prefixcache.cpu import auto_dtype
from tests.support.attention_worlds import NUM_HEADS, attention_call, largest_difference, random_spans, truth
from tests.support.seeds import seeded
from worker.attention.backend import AttentionCall
from worker.attention.cpu_sdpa import CpuSdpa
from worker.attention.key_steps import KEY_STEP, padded_keys
from worker.attention.step_layout import StepLayout
from worker.kv_cache import KVCache, KVShape, LayerShape
from worker.runner import StepShare

CALLS = {
    "plain": attention_call(),
    "scaling": attention_call(scaling=0.11),
    "window-1": attention_call(window=1),
    "window-70": attention_call(window=70),
    "softcap": attention_call(softcap=2.0),
    "sinks": attention_call(sinks=torch.linspace(-2, 2, NUM_HEADS)),
    "all": attention_call(window=30, softcap=1.5, sinks=torch.linspace(0, 1, NUM_HEADS)),
}
SHAPES = {
    "grouped": LayerShape(num_kv_heads=2, key_dim=16, value_dim=16),
    "one KV head": LayerShape(num_kv_heads=1, key_dim=8, value_dim=8),
    "one head a KV head": LayerShape(num_kv_heads=6, key_dim=24, value_dim=16),
}
SEVERAL_TILES = [[(0, 150)], [(70, 213)], [(64, 65), (63, 64), (128, 129)], [(0, 64), (64, 66), (1, 129)]]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_row_attends_to_its_own_keys(call: AttentionCall, shape: LayerShape) -> None:
    source = seeded(f"tiles {call} {shape}")
    for spans in (*SEVERAL_TILES, random_spans(source)):
        assert largest_difference(CpuSdpa, call, shape, spans, source, dtype=torch.bfloat16) < 0.06, spans


# --- the same bits ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """One sequence in a cache of its own."""

    query: Tensor  # [1, NUM_HEADS, tokens, key_dim]
    key: Tensor  # [1, num_kv_heads, tokens, key_dim]
    value: Tensor  # [1, num_kv_heads, tokens, value_dim]

    @classmethod
    def draw(cls, shape: LayerShape, num_tokens: int, source: random.Random, *, size: float = 1.0) -> _Sequence:
        generator = torch.Generator().manual_seed(source.getrandbits(32))
        query, key, value = (
            torch.randn(1, heads, num_tokens, dim, generator=generator)
            for heads, dim in (
                (NUM_HEADS, shape.key_dim),
                (shape.num_kv_heads, shape.key_dim),
                (shape.num_kv_heads, shape.value_dim),
            )
        )
        return cls(query=(query * size).bfloat16(), key=key.bfloat16(), value=value.bfloat16())

    def attend(
        self, call: AttentionCall, source: random.Random, cuts: Sequence[int], wide_layers: Collection[int] = ()
    ) -> Tensor:
        """[tokens, NUM_HEADS, value_dim], computed in chunks that end at `cuts`."""
        num_kv_heads, num_tokens, value_dim = self.value.shape[1:]
        layer = LayerShape(num_kv_heads=num_kv_heads, key_dim=self.key.shape[-1], value_dim=value_dim)
        num_blocks = -(-num_tokens // 16)
        cache = KVCache(KVShape(layers={0: layer}, dtype=torch.bfloat16, block_size=16), num_blocks)
        cache.layers[0].keys.fill_(math.nan)
        cache.layers[0].values.fill_(math.nan)
        backend, table = CpuSdpa(cache, wide_layers), source.sample(range(num_blocks), num_blocks)
        rows, start = [], 0
        for end in cuts:
            share = StepShare(token_ids=[0] * (end - start), start=start, block_table=table, sample=None)
            step = StepLayout.pack([share], 16)
            packed = (tensor[:, :, start:end] for tensor in (self.query, self.key, self.value))
            rows.append(backend.attend(call, step, *packed)[0])
            start = end
        return torch.cat(rows)


needs_bfloat16 = pytest.mark.skipif(auto_dtype() != "bfloat16", reason="a CPU that multiplies bfloat16 itself")


@needs_bfloat16
@pytest.mark.parametrize("is_wide", [False, True], ids=["rounded scores", "wide scores"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_cut_changes_no_bit(call: AttentionCall, shape: LayerShape, is_wide: bool) -> None:
    source = seeded(f"cuts {call} {shape} {is_wide}")
    num_tokens = source.randint(200, 400)
    sequence = _Sequence.draw(shape, num_tokens, source)
    wide_layers = {0} if is_wide else set()
    whole = sequence.attend(call, source, [num_tokens], wide_layers)
    for _ in range(4):
        chunks = source.sample(range(1, num_tokens - 30), source.randint(1, 9))
        decodes = range(num_tokens - source.randint(1, 30), num_tokens + 1)
        cuts = [*sorted(chunks), *decodes]
        assert torch.equal(sequence.attend(call, source, cuts, wide_layers), whole), cuts


@needs_bfloat16
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_decode_after_thousands_of_keys_changes_no_bit(shape: LayerShape) -> None:
    """A single row of weights would be summed in another order past 1,024 keys; 1 in 100 showed it."""
    source = seeded(f"decodes {shape}")
    sequence = _Sequence.draw(shape, 2_300, source)
    whole = sequence.attend(CALLS["plain"], source, [2_300])
    assert torch.equal(sequence.attend(CALLS["plain"], source, range(2_200, 2_301)), whole)


# --- scores and memory ------------------------------------------------------------------------------------


def test_large_scores_are_right_in_wide_layers_only() -> None:
    """Scores of some hundreds, of which the largest few matter: rounded to bfloat16 they are off by up to one."""
    source = seeded("wide")
    shape, call = SHAPES["grouped"], CALLS["scaling"]
    sequence = _Sequence.draw(shape, 100, source, size=60.0)
    expected = torch.stack(
        [
            truth(call, sequence.query[0, :, place].float(), place, sequence.key[0], sequence.value[0])
            for place in range(100)
        ]
    )
    rounded, wide = (sequence.attend(call, source, [90, 100], layers) for layers in ((), (0,)))
    off = (wide.double() - expected).abs().max()
    assert off < 0.06
    assert (rounded.double() - expected).abs().max() > 3 * off


def test_what_an_earlier_step_left_behind_is_not_read() -> None:
    """Keys, values, scores and weights pass through the same memory; a NaN there must not reach a row."""
    seed = seeded("scratch").getrandbits(32)
    shape = SHAPES["grouped"]
    cache = KVCache(KVShape(layers={0: shape}, dtype=torch.bfloat16, block_size=16), 20)
    backend = CpuSdpa(cache)
    outs = []
    for bad in (0.0, math.nan):
        sequence = _Sequence.draw(shape, 300, random.Random(seed))
        for size, tensor in ((300, torch.full_like(sequence.value, bad)), (190, sequence.value)):
            share = StepShare(token_ids=[0] * size, start=0, block_table=range(20), sample=None)
            step = StepLayout.pack([share], 16)
            out = backend.attend(
                CALLS["plain"], step, sequence.query[:, :, :size], sequence.key[:, :, :size], tensor[:, :, :size]
            )
        outs.append(out)
    assert outs[1].isfinite().all()
    assert torch.equal(*outs)


def test_few_lengths_are_computed_with() -> None:
    lengths = [padded_keys(num_keys) for num_keys in range(1, 8_193)]
    assert len(set(lengths)) == 40
    for num_keys, length in enumerate(lengths, start=1):
        assert length % KEY_STEP == 0
        assert num_keys <= length < num_keys + max(KEY_STEP, num_keys / 8)
