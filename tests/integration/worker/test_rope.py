"""Ropes that follow the longest sequence of a forward are held still at what transformers chooses for that one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from prefixcache.errors import ConfigError
from tests.support.family_worlds import plain_logits
from tests.support.tiny_models import ORIGINAL_POSITIONS, STRETCHED, tiny_model
from worker.attention import self_test
from worker.rope import freeze_rope

IDS = [5, 9, 300, 41, 7, 77, 8, 450, 23, 12]
LONGEST = 4 * ORIGINAL_POSITIONS


def _difference(model: PreTrainedModel, reference: PreTrainedModel, *, beside: int, reference_beside: int) -> float:
    ours, theirs = plain_logits(model, IDS, beside), plain_logits(reference, IDS, reference_beside)
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("name", STRETCHED)
def test_frozen_is_what_transformers_chooses_for_the_longest(name: str) -> None:
    """Beside whatever neighbour."""
    frozen = tiny_model(name)
    freeze_rope(frozen, LONGEST)
    for beside in (len(IDS), ORIGINAL_POSITIONS, LONGEST // 2, LONGEST):
        assert _difference(frozen, tiny_model(name), beside=beside, reference_beside=LONGEST) < 1e-6
    assert _difference(tiny_model(name), tiny_model(name), beside=len(IDS), reference_beside=LONGEST) > 1e-3


@pytest.mark.parametrize("name", STRETCHED)
def test_up_to_the_original_length_nothing_is_stretched(name: str) -> None:
    frozen = tiny_model(name)
    freeze_rope(frozen, ORIGINAL_POSITIONS)
    for beside in (len(IDS), LONGEST):
        assert _difference(frozen, tiny_model(name), beside=beside, reference_beside=len(IDS)) < 1e-6


def test_a_rope_that_looks_at_no_neighbour_is_left_as_it_is() -> None:
    model = tiny_model("Llama, llama3 rope")
    freeze_rope(model, LONGEST)
    assert model.model.rotary_emb.rope_type == "llama3"
    assert _difference(model, tiny_model("Llama, llama3 rope"), beside=LONGEST, reference_beside=len(IDS)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STRETCHED)
def test_one_that_is_not_frozen_is_found_out(name: str, dtype: torch.dtype) -> None:
    model: Any = tiny_model(name)
    model.to(dtype)
    self_test.examine(model)
    self_test.check_neighbours(model, ORIGINAL_POSITIONS)
    with pytest.raises(ConfigError, match=r"K of layer \d changes by \d+\.\d% beside a sequence of 256 tokens"):
        self_test.check_neighbours(model, LONGEST)
    freeze_rope(model, LONGEST)
    self_test.check_neighbours(model, LONGEST)
