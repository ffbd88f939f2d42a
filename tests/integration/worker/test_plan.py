"""What `prefixcache plan` reads from files, held to what the worker really keeps of every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixcache.errors import ConfigError
from prefixcache.model_files import max_positions, read_json
from prefixcache.planning.kv_layout import kv_layout
from prefixcache.planning.weights import weights_bytes
from tests.support.packed_steps import runner_of
from tests.support.tiny_models import FAMILIES, MAX_POSITIONS, tiny_model
from worker.attention import self_test

OTHER_STATE = ("FalconH1", "Lfm2", "Llama4Text", "Mamba", "Qwen3Next")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_what_its_config_says(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = read_json(path)
    limits = runner_of(model, num_blocks=2).limits
    layout = kv_layout(config, path)
    assert layout.bytes_per_token(4) == limits.kv_bytes_per_token
    shapes = self_test.examine(model).shapes
    for index, layer in enumerate(layout.layers):
        shape = shapes[index]
        assert (layer.num_kv_heads, layer.key_dim, layer.value_dim) == (
            shape.num_kv_heads,
            shape.key_dim,
            shape.value_dim,
        )
    stored = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}  # tied ones once
    assert weights_bytes(tmp_path, config, 4) == 4 * sum(stored.values())
    assert max_positions(config, path) == MAX_POSITIONS


@pytest.mark.parametrize("family", OTHER_STATE)
def test_a_family_with_other_state_is_refused(family: str, tmp_path: Path) -> None:
    tiny_model(family).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="only layers that keep K and V of every token"):
        kv_layout(read_json(path), path)
