"""Decodes of many lengths at once: each row is right, and the same bits as alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from prefixcache.cpu import auto_dtype
from tests.support.attention_worlds import NUM_HEADS, attention_call, truth
from tests.support.seeds import seeded
from worker.attention import decodes
from worker.attention.backend import AttentionCall
from worker.attention.decodes import DecodeAttention
from worker.attention.scratch import Scratch
from worker.attention.step_layout import StepLayout
from worker.kv_cache import KVCache, KVShape, LayerShape
from worker.runner import StepShare

SHAPES = {
    "grouped": LayerShape(num_kv_heads=2, key_dim=16, value_dim=16),
    "one KV head": LayerShape(num_kv_heads=1, key_dim=8, value_dim=8),
    "one head a KV head": LayerShape(num_kv_heads=6, key_dim=24, value_dim=16),
}
WINDOWS = (None, 1, 70, 400)


class _World:
    """Sequences whose K and V stand in shuffled blocks of one layer, and a query for the last token of each."""

    def __init__(
        self, shape: LayerShape, lengths: Sequence[int], source: random.Random, *, block_size: int = 16
    ) -> None:
        generator = torch.Generator().manual_seed(source.getrandbits(32))

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).bfloat16()

        num_blocks = sum(-(-length // block_size) for length in lengths)
        cache = KVCache(KVShape(layers={0: shape}, dtype=torch.bfloat16, block_size=block_size), num_blocks)
        self.layer = cache.layers[0]
        for pool in (self.layer.keys, self.layer.values):
            pool.fill_(math.nan)
        free = source.sample(range(num_blocks), num_blocks)
        self.block_size = block_size
        self.query = draw(NUM_HEADS, len(lengths), shape.key_dim)
        self.sequences: list[tuple[Tensor, Tensor]] = []
        self.shares: list[StepShare] = []
        for length in lengths:
            table = [free.pop() for _ in range(-(-length // block_size))]
            keys = draw(length, shape.num_kv_heads, shape.key_dim)
            values = draw(length, shape.num_kv_heads, shape.value_dim)
            slots = [table[place // block_size] * block_size + place % block_size for place in range(length)]
            self.layer.write(torch.tensor(slots), keys, values)
            self.sequences.append((keys.transpose(0, 1), values.transpose(0, 1)))
            self.shares.append(StepShare(token_ids=[0], start=length - 1, block_table=table, sample=None))

    def attend(self, call: AttentionCall, chosen: Sequence[int]) -> Tensor:
        """[len(chosen), NUM_HEADS, value_dim] of a step of these sequences."""
        step = StepLayout.pack([self.shares[place] for place in chosen], self.block_size)
        out = torch.full((len(chosen), NUM_HEADS, self.layer.values.shape[-1]), math.nan).bfloat16()
        attention = DecodeAttention(Scratch(torch.bfloat16))
        attention.attend(call, step, step.sequences, self.layer, self.query[:, chosen], out)
        return out

    def truth(self, call: AttentionCall, place: int) -> Tensor:
        keys, values = self.sequences[place]
        return truth(call, self.query[:, place].float(), keys.shape[1] - 1, keys, values)


def _lengths(source: random.Random) -> list[int]:
    """Of all sizes: below a block, at the edges of blocks and steps, alike and alone."""
    return [1, 15, 16, 17, 63, 64, 65, *(source.randint(1, 500) for _ in range(12)), *[source.randint(300, 310)] * 9]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_row_attends_to_its_own_keys(shape: LayerShape, window: int | None) -> None:
    source = seeded(f"decodes {shape} {window}")
    world = _World(shape, _lengths(source), source, block_size=source.choice([4, 16, 64]))
    call = attention_call(window=window)
    order = source.sample(range(len(world.shares)), len(world.shares))
    out = world.attend(call, order)
    expected = torch.stack([world.truth(call, place) for place in order])
    assert (out.double() - expected).abs().max() < 0.06


@pytest.mark.skipif(auto_dtype() != "bfloat16", reason="a CPU that multiplies bfloat16 itself")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_neighbours_change_no_bit(shape: LayerShape, window: int | None) -> None:
    source = seeded(f"neighbours {shape} {window}")
    world = _World(shape, _lengths(source), source)
    call = attention_call(window=window)
    everybody = world.attend(call, range(len(world.shares)))
    for place, row in enumerate(everybody):
        assert torch.equal(world.attend(call, [place])[0], row), place


def test_layers_of_one_step_may_have_windows_of_their_own() -> None:
    """And a next step finds nothing of an earlier one."""
    source = seeded("windows")
    world = _World(SHAPES["grouped"], [200, 90, 33], source)
    attention = DecodeAttention(Scratch(torch.bfloat16))
    for chosen in ([0, 1, 2], [2, 1], [1, 0]):
        step = StepLayout.pack([world.shares[place] for place in chosen], 16)
        for window in (None, 40, None):
            call = attention_call(window=window)
            out = torch.zeros(len(chosen), NUM_HEADS, 16).bfloat16()
            attention.attend(call, step, step.sequences, world.layer, world.query[:, chosen], out)
            assert torch.equal(out, world.attend(call, chosen))


# --- groups -----------------------------------------------------------------------------------------------


def _groups(
    lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch, *, keys_at_once: int = 8_192
) -> list[tuple[int, int]]:
    """(sequences, keys) of each group."""
    monkeypatch.setattr(decodes, "_KEYS_AT_ONCE_BYTES", keys_at_once * 2 * 16 * 2)
    world = _World(SHAPES["grouped"], lengths, random.Random(1))
    step = StepLayout.pack(world.shares, 16)
    plan = decodes._plan(step.sequences, None, world.layer.keys, 16)
    assert sorted(plan.rows.tolist()) == list(range(len(lengths)))
    return [(group.num_sequences, group.num_keys) for group in plan.groups]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10], [(1, 64)]),
        ([1_000] * 8, [(8, 1_024)]),
        ([1_000] * 32, [(8, 1_024)] * 4),
        ([1_000] * 7, [(4, 1_024), (2, 1_024), (1, 1_024)]),
        ([1_000, 900, 800, 760], [(2, 1_024), (2, 832)]),
        ([400, 5_000], [(1, 5_056), (1, 448)]),
        ([9_000, 9_000], [(1, 9_024), (1, 9_024)]),
    ],
)
def test_groups_are_alike_few_and_small(
    lengths: list[int], expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power of two sequences, none shorter than three quarters of the longest, no more keys than fit at once."""
    assert _groups(lengths, monkeypatch) == expected
