"""Loading from a folder, and how long sequences may become."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig

from prefixcache.cpu import auto_dtype
from prefixcache.errors import ConfigError
from tests.support.tiny_models import tiny_model, write_model
from worker.attention.backend import AttentionCall
from worker.kv_cache import CPU
from worker.model_folder import ModelFolder
from worker.model_loader import DTYPES, check_length, load_model, resolve_device, resolve_dtype, vocab_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_model("Llama"), tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_loaded_in_the_dtype_asked_for(folder: Path, dtype: torch.dtype) -> None:
    model = load_model(ModelFolder.open(folder), dtype)
    assert model.dtype == dtype
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert vocab_size(model) == 512


def test_dtype_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("auto", CPU) == DTYPES[auto_dtype()]
    for in_hardware, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: in_hardware)  # noqa: B023
        assert resolve_dtype("auto", torch.device("cuda")) == dtype
    with pytest.raises(ConfigError, match="'float8' is not known; give auto, float32 or bfloat16"):
        resolve_dtype("float8", CPU)


def test_device_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match="device 'tpu' is not known; give auto, cpu or cuda"):
        resolve_device("tpu")


@pytest.mark.parametrize(("version", "finding"), [(None, "is built without CUDA"), ("13.0", "finds no usable CUDA")])
def test_cuda_that_is_not_there_is_refused(version: str | None, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(ConfigError, match=f"--device is cuda, but torch .* {finding}.*; give --device cpu"):
        resolve_device("cuda")


def test_a_device_without_room_is_a_config_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(_model: object, _device: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("transformers.PreTrainedModel.to", move)
    with pytest.raises(ConfigError, match=r"cannot be moved to cuda: CUDA out of memory"):
        load_model(ModelFolder.open(folder), torch.float32, torch.device("cuda"))


def test_weights_that_lack_a_tensor_are_refused(folder: Path, tmp_path: Path) -> None:
    """transformers would fill it with random numbers and go on."""
    write_model(tiny_model("Llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights of LlamaForCausalLM.*layers\.2\.mlp\.up_proj"):
        load_model(ModelFolder.open(tmp_path), torch.float32)


def test_weights_of_another_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    write_model(tiny_model("Llama"), tmp_path)
    config = (tmp_path / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 128', '"intermediate_size": 96'))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelFolder.open(tmp_path), torch.float32)


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    write_model(tiny_model("Llama"), tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "vocab_size": 512, "max_position_embeddings": 64, "architectures": ["Own"], '
        '"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('code of the model folder ran')")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelFolder.open(tmp_path), torch.float32)


def test_layers_with_other_state_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tiny_model("Lfm2"), tmp_path)
    with pytest.raises(ConfigError, match="layers of type conv"):
        load_model(ModelFolder.open(tmp_path), torch.float32)


def _calls(*windows: int | None) -> Mapping[int, AttentionCall]:
    return {
        layer: AttentionCall(layer=layer, scaling=1.0, sliding_window=window, softcap=None, sinks=None)
        for layer, window in enumerate(windows)
    }


class TestLength:
    def test_a_window_that_is_applied_is_no_bound(self) -> None:
        check_length(MistralConfig(sliding_window=32), _calls(32, 32), 10_000)

    def test_a_window_that_is_not_applied_bounds_the_length(self) -> None:
        config = MistralConfig(sliding_window=32)
        check_length(config, _calls(32, None), 32)
        with pytest.raises(ConfigError, match=r"layer 1 does not apply its sliding window of 32 tokens.*to 32 or less"):
            check_length(config, _calls(32, None), 33)

    def test_layer_types_say_which_layers_have_a_window(self) -> None:
        config = MistralConfig(sliding_window=32, num_hidden_layers=2)
        config.layer_types = ["full_attention", "sliding_attention"]
        check_length(config, _calls(None, 32), 10_000)
        with pytest.raises(ConfigError, match="layer 1"):
            check_length(config, _calls(None, None), 33)
