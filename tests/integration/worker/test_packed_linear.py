"""Packed linear layers answer to the bit as plain ones, and only those are packed of which that is known."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.tiny_models import FAMILIES, VARIANTS, tiny_model, write_model
from worker import packed_linear
from worker.model_folder import ModelFolder
from worker.model_loader import load_model
from worker.packed_linear import PackedLinear, pack_linear_layers

FEW = torch.zeros(1, 2, dtype=torch.long)
ROWS = (1, 2, 3, 8, 31, 32, 33, 64, 200)


def layer(num_in: int, num_out: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(num_in * num_out)
    return nn.Linear(num_in, num_out, bias=bias).to(dtype).requires_grad_(False)


def _in_bfloat16(name: str, **overrides: Any) -> PreTrainedModel:
    model = tiny_model(name, **overrides)
    nn.Module.to(model, torch.bfloat16)
    nn.Module.eval(model)
    return model


def nothing() -> None:
    """A forward that shows no siblings."""


def num_packed(model: nn.Module) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(576, 1_536), (1_536, 576), (576, 192), (33, 65), (8, 3), (64, 1)])
@torch.inference_mode()
def test_products_are_the_same_to_the_bit_whatever_the_number_of_rows(shape: tuple[int, int], *, bias: bool) -> None:
    plain = layer(*shape, bias=bias)
    packed = PackedLinear(plain)
    for num_rows in ROWS:
        rows = torch.randn(1, num_rows, shape[0], dtype=torch.bfloat16)
        assert torch.equal(packed(rows), plain(rows)), num_rows


@torch.inference_mode()
def test_rows_may_be_a_view_of_others() -> None:
    plain = layer(64, 32)
    rows = torch.randn(40, 128, dtype=torch.bfloat16)[::2, 32:96]
    assert torch.equal(PackedLinear(plain)(rows), plain(rows))


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
@torch.inference_mode()
def test_every_family_answers_alike_with_its_layers_packed(name: str) -> None:
    plain = _in_bfloat16(name)
    packed = copy.deepcopy(plain)
    pack_linear_layers(packed, partial(packed, input_ids=FEW, use_cache=False))
    for num_tokens in (1, 9):
        ids = torch.arange(3, 3 + num_tokens).unsqueeze(0)
        assert torch.equal(packed(input_ids=ids, use_cache=False).logits, plain(input_ids=ids, use_cache=False).logits)


def test_an_output_layer_tied_to_the_embeddings_leaves_them_as_they_are() -> None:
    model = _in_bfloat16("Llama", tie_word_embeddings=True)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    embeddings = weight.clone()
    assert pack_linear_layers(model, partial(model, input_ids=FEW, use_cache=False)) == num_packed(model) > 7
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(weight, embeddings)


def test_a_layer_that_stands_in_two_places_is_packed_once() -> None:
    shared = layer(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert pack_linear_layers(model, nothing) == 1
    assert model[0] is model[2]


def test_others_stay_as_they_are() -> None:
    class Scaled(nn.Linear):
        """Computes something of its own."""

    scaled = Scaled(8, 8).to(torch.bfloat16)
    model = nn.Sequential(layer(8, 8, dtype=torch.float32), scaled, nn.Embedding(4, 8, dtype=torch.bfloat16))
    assert pack_linear_layers(model, nothing) == 0
    assert num_packed(model) == 0


def test_what_packed_weights_took_the_place_of_is_told_by_shape_and_dtype() -> None:
    packed = PackedLinear(layer(8, 4))
    assert (packed.weight.shape, packed.weight.dtype) == ((4, 8), torch.bfloat16)
    assert (packed.in_features, packed.out_features) == (8, 4)


@pytest.mark.parametrize("fault", ["refuses", "differs"])
def test_a_layer_that_cannot_be_packed_or_would_differ_stays(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = nn.Sequential(layer(8, 8), layer(8, 4))

    class Faulty(PackedLinear):
        def __init__(self, plain: nn.Linear) -> None:
            if plain.out_features == 4:
                if fault == "refuses":
                    raise RuntimeError("this build of torch has no oneDNN")
                plain = _negated(plain)
            super().__init__(plain)

    with patch.object(packed_linear, "PackedLinear", Faulty):
        assert pack_linear_layers(model, nothing) == 1
    assert type(model[1]) is nn.Linear
    assert "1 of 2 linear layers cannot be packed here" in caplog.text


def _negated(plain: nn.Linear) -> nn.Linear:
    other = copy.deepcopy(plain)
    other.weight.data.neg_()
    return other


def test_a_loaded_model_is_packed_in_bfloat16_and_has_left_its_file(tmp_path: Path) -> None:
    folder = ModelFolder.open(write_model(tiny_model("Llama"), tmp_path))
    assert num_packed(load_model(folder, torch.float32)) == 0
    model = load_model(folder, torch.bfloat16)
    assert num_packed(model) > 0
    mapped = {Path(each.path) for each in psutil.Process().memory_maps()}
    assert not {path for path in mapped if path.is_relative_to(tmp_path)}
