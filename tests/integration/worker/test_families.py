"""Every model family that is served, and those that must not be, through the load-time self-test and random steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from tests.support.packed_steps import runner_of, worst_error
from tests.support.seeds import seeded
from tests.support.tiny_models import FAMILIES, MAX_POSITIONS, REFUSED_FAMILIES, tiny_model
from worker.attention import self_test
from worker.model_loader import check_layer_types, check_length


@pytest.mark.parametrize("family", FAMILIES)
def test_a_served_family_equals_its_plain_forward(family: str) -> None:
    model = tiny_model(family)
    expected = self_test.expect(model)
    assert worst_error(model, seeded(family)) < 1e-5
    check_layer_types(model.config, Path("tiny"))
    examination = self_test.examine(model)
    check_length(model.config, examination.calls, MAX_POSITIONS)
    self_test.verify(model, expected, runner_of(model, num_blocks=2).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_passes_the_self_test(family: str) -> None:
    model = tiny_model(family).bfloat16()
    expected = self_test.expect(model)
    self_test.verify(model, expected, runner_of(model, num_blocks=2).logits)


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_a_family_with_other_state_is_refused(family: str) -> None:
    model = tiny_model(family)
    expected = self_test.expect(model)
    with pytest.raises(ConfigError, match=r"cannot be served|layers of type"):
        check_layer_types(model.config, Path("tiny"))
        self_test.verify(model, expected, runner_of(model, num_blocks=2).logits)
