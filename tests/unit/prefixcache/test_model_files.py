"""Heads of safetensors files, and the weights they add up to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixcache.errors import ConfigError
from prefixcache.model_files import WeightsFile, has_weights, max_positions, read_json
from prefixcache.planning.weights import weights_bytes
from tests.support.weight_files import Shapes, write_weights

EMBEDDINGS: Shapes = {"embed.weight": ("BF16", (100, 8))}
HEAD: Shapes = {"lm_head.weight": ("F32", (100, 8))}
OTHERS: Shapes = {"norm.weight": ("F64", (8,)), "packed.qweight": ("U8", (50,)), "scale": ("F32", ())}


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_floats_take_the_type_they_are_computed_in_and_the_rest_what_it_has(tmp_path: Path, element_bytes: int) -> None:
    write_weights(tmp_path / "model.safetensors", {**EMBEDDINGS, **HEAD, **OTHERS})
    assert weights_bytes(tmp_path, {}, element_bytes) == (800 + 800 + 8 + 1) * element_bytes + 50


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_a_head_that_is_tied_is_loaded_once(tmp_path: Path, config: dict[str, Any]) -> None:
    write_weights(tmp_path / "model.safetensors", {**EMBEDDINGS, **HEAD})
    assert weights_bytes(tmp_path, config, 2) == 1_600


def test_all_shards_count(tmp_path: Path) -> None:
    write_weights(tmp_path / "a.safetensors", EMBEDDINGS)
    write_weights(tmp_path / "b.safetensors", HEAD)
    weight_map = {"embed.weight": "a.safetensors", "lm_head.weight": "b.safetensors", "x": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert has_weights(tmp_path)
    assert weights_bytes(tmp_path, {}, 2) == 3_200
    (tmp_path / "b.safetensors").unlink()
    assert has_weights(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks b\.safetensors"):
        weights_bytes(tmp_path, {}, 2)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        weights_bytes(tmp_path, {}, 2)


def test_what_a_file_says_of_itself(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "w", EMBEDDINGS)
    file = WeightsFile.open(path)
    assert file.size_bytes == path.stat().st_size == file.data_start + 1_600
    assert (file.tensors["embed.weight"].dtype, file.tensors["embed.weight"].shape) == ("BF16", (100, 8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short or no safetensors file"),
        (bytes(7), "cut short or no safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "cut short or no safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "broken safetensors header"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "broken safetensors header"),
        ((2).to_bytes(8, "little") + b"{}x", "holds 1 bytes of tensors, its header 0"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        WeightsFile.open(tmp_path / "w")


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds 1599 bytes of tensors, its header 1600: cut short"):
        WeightsFile.open(write_weights(tmp_path / "w", EMBEDDINGS, cut=1))


@pytest.mark.parametrize(
    "config", [{"n_positions": 7}, {"max_position_embeddings": 7}, {"text_config": {"max_seq_len": 7}}, {"n_ctx": 7}]
)
def test_the_longest_sequence_has_many_names(config: dict[str, Any]) -> None:
    assert max_positions(config, Path("config.json")) == 7


@pytest.mark.parametrize(
    ("text", "message"), [(None, "has no config.json"), ("{", "cannot be read"), ("[]", "holds no JSON object")]
)
def test_a_config_that_is_none_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_json(path)
