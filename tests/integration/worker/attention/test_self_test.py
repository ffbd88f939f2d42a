"""Models that cannot be served are refused at load, with the finding."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

from prefixcache.errors import ConfigError
from tests.support.packed_steps import runner_of
from tests.support.tiny_models import NUM_LAYERS, tiny_model
from worker.attention import self_test
from worker.kv_cache import LayerShape


def _verify(model: PreTrainedModel) -> None:
    expected = self_test.expect(model)
    self_test.verify(model, expected, runner_of(model, num_blocks=2).logits)


def test_a_served_model_passes_and_shows_its_layers() -> None:
    model = tiny_model("Llama")
    _verify(model)
    examination = self_test.examine(model)
    assert sorted(examination.calls) == list(range(NUM_LAYERS))
    assert examination.calls[0].scaling == 16**-0.5
    assert examination.shapes == dict.fromkeys(range(NUM_LAYERS), LayerShape(num_kv_heads=2, key_dim=16, value_dim=16))


@pytest.mark.parametrize("family", ["Bloom", "Mamba"])
def test_layers_that_never_call_are_counted(family: str) -> None:
    with pytest.raises(ConfigError, match=f"{family}ForCausalLM.*0 of its 4 layers called the attention function"):
        _verify(tiny_model(family))


def test_a_layer_that_calls_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Llama")
    layers = model.model.layers
    monkeypatch.setattr(layers[1].self_attn, "layer_idx", 0)
    with pytest.raises(ConfigError, match="3 of its 4 layers called the attention function, 4 calls"):
        self_test.examine(model)


def test_attention_that_is_not_causal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Llama")
    monkeypatch.setattr(model.model.layers[2].self_attn, "is_causal", False)
    with pytest.raises(ConfigError, match="layer 2 is not causal"):
        self_test.examine(model)


def test_state_beside_k_and_v_shows_in_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that mixes each row with the row before it, as convolutions do, cannot go on from cached KV."""
    model = tiny_model("Llama")
    norm = model.model.layers[0].input_layernorm
    plain = norm.forward

    def mixing(hidden: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = plain(hidden)
        return rows + rows.roll(1, dims=1)

    monkeypatch.setattr(norm, "forward", mixing)
    with pytest.raises(ConfigError, match=r"over cached KV its logits are off by \d+"):
        _verify(model)


def test_a_model_whose_own_forward_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Llama")
    monkeypatch.delattr(model.model, "norm")
    with pytest.raises(ConfigError, match="its own forward fails"):
        self_test.expect(model)


def test_relative_error_ignores_what_softmax_ignores() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    assert self_test.relative_error(logits + 100, logits) < 1e-5
    assert self_test.relative_error(logits * 1.5, logits) == pytest.approx(0.5)
    assert math.isnan(self_test.relative_error(torch.full_like(logits, torch.nan), logits))
