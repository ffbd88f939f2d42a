"""What a query-key pair is taken to cost, counted by hand for models whose shapes are known."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from tests.support.packed_steps import runner_of
from tests.support.tiny_models import FAMILIES, tiny_model
from worker.attention import self_test
from worker.attention.cost import SLOWER, pair_rows
from worker.kv_cache import KVShape


def cost_of(model: PreTrainedModel) -> float:
    shapes = self_test.examine(model).shapes
    return pair_rows(model, KVShape(layers=shapes, dtype=model.dtype, block_size=16))


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_of_known_shape(tied: bool) -> None:
    """64 wide, 4 heads of 16, 2 of them with KV, 128 in the feed-forward part; embeddings and head are left out."""
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    expected = SLOWER * 4 * (16 + 16) / layer
    assert cost_of(tiny_model("Llama", tie_word_embeddings=tied)) == pytest.approx(expected)


def test_values_of_another_width_than_keys() -> None:
    narrow, wide = (cost_of(tiny_model("DeepseekV3", v_head_dim=width)) for width in (16, 17))
    assert wide > narrow


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_one(name: str) -> None:
    model = tiny_model(name)
    assert 0 < cost_of(model) < 1


def test_the_engine_is_told() -> None:
    model = tiny_model("Llama")
    assert runner_of(model, num_blocks=2).limits.pair_rows == pytest.approx(cost_of(model))
