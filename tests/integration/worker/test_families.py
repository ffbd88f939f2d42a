"""Every model family that is served, and those that must not be, through the load-time self-test and a whole engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefixcache.errors import ConfigError
from tests.support.attention_makers import MAKERS
from tests.support.family_worlds import FamilyWorld
from tests.support.packed_steps import runner_of, worst_error
from tests.support.seeds import seeded
from tests.support.tiny_models import FAMILIES, MAX_POSITIONS, REFUSED_FAMILIES, STRETCHED, VARIANTS, tiny_model
from worker.attention import self_test
from worker.attention.backends import BACKENDS
from worker.kv_cache import KVCache, KVShape
from worker.model_loader import check_layer_types, check_length
from worker.model_runner import TorchRunner

SERVED = (*FAMILIES, *VARIANTS)
OF_EACH_KIND = (
    "DeepseekV3",
    "Gemma2",
    "Gemma3Text, dynamic rope",
    "Gemma4Text",
    "GPT2",
    "GptOss",
    "Llama",
    "Llama, one KV head",
    "Mistral",
    "Phi3, longrope",
)
"""What families ask of their attention: other widths, windows, caps, sinks, ropes and groups of heads."""


@pytest.mark.parametrize("name", SERVED)
def test_a_served_family_equals_its_plain_forward(name: str) -> None:
    model = tiny_model(name)
    assert worst_error(model, seeded(name)) < 1e-5
    check_layer_types(model.config, Path("tiny"))
    examination = self_test.examine(model)
    check_length(model.config, examination.calls, MAX_POSITIONS)
    self_test.check_neighbours(model, MAX_POSITIONS)
    self_test.verify(model, self_test.expect(model), runner_of(model, num_blocks=2).logits)


@pytest.mark.parametrize("name", (*SERVED, *STRETCHED))
def test_cached_answers_are_uncached_answers_are_those_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the engine, with random prefixes, chunks and neighbours."""
    assert FamilyWorld(name, MAKERS["cpu_sdpa"], seeded(name)).play(monkeypatch) > 0


@pytest.mark.parametrize("name", OF_EACH_KIND)
@pytest.mark.parametrize("backend", [backend for backend in MAKERS if backend != "cpu_sdpa"])
def test_other_backends_answer_alike(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they can: torch_varlen is asked as if a GPU were there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    obstacle = BACKENDS[backend.split("-")[0]].obstacle
    if obstacle(self_test.examine(tiny_model(name)), torch.bfloat16, torch.device("cuda")) is None:
        assert FamilyWorld(name, MAKERS[backend], seeded(f"{name} {backend}")).play(monkeypatch) > 0


@pytest.mark.parametrize("name", SERVED)
def test_bfloat16_passes_the_self_test(name: str) -> None:
    model = tiny_model(name).bfloat16()
    self_test.examine(model)
    self_test.check_neighbours(model, MAX_POSITIONS)
    self_test.verify(model, self_test.expect(model), runner_of(model, num_blocks=2).logits)


def test_layers_with_large_scores_are_found_by_trying() -> None:
    model = tiny_model("Llama").bfloat16()
    assert self_test.examine(model).wide_layers == frozenset()
    model.get_parameter("model.layers.2.self_attn.k_proj.weight").mul_(1_000)
    examination = self_test.examine(model)
    assert examination.wide_layers == {2}
    backend = BACKENDS["cpu_sdpa"]
    cache = KVCache(KVShape(layers=examination.shapes, dtype=model.dtype, block_size=16), 2)
    runner = TorchRunner(model, cache, max_model_len=32, threads=1, backend=backend.make(cache, examination))
    self_test.verify(model, self_test.expect(model), runner.logits)


@pytest.mark.parametrize("name", REFUSED_FAMILIES)
def test_a_family_with_other_state_is_refused(name: str) -> None:
    model = tiny_model(name)
    with pytest.raises(ConfigError, match=r"cannot be served|layers of type"):
        check_layer_types(model.config, Path("tiny"))
        self_test.verify(model, self_test.expect(model), runner_of(model, num_blocks=2).logits)
