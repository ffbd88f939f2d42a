"""What `load_runner` is told of device and attention, and how long ropes may become."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixcache.errors import ConfigError
from tests.support.family_worlds import plain_logits
from tests.support.packed_steps import GREEDY
from tests.support.tiny_models import tiny_model, write_model
from worker.attention.cpu_sdpa import CpuSdpa
from worker.attention.sdpa_gather import SdpaGather
from worker.model_folder import ModelFolder
from worker.model_runner import TorchRunner, load_runner
from worker.runner import StepShare

IDS = [5, 9, 300, 41, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder.open(write_model(tiny_model("Llama"), tmp_path_factory.mktemp("models") / "tiny-llama"))


def _load(folder: ModelFolder, *, max_model_len: int | None = None, **settings: Any) -> TorchRunner:
    return load_runner(
        folder, dtype="float32", num_blocks=16, kv_memory=0, max_model_len=max_model_len, threads=1, **settings
    )


def _last_logits(runner: TorchRunner, ids: list[int]) -> torch.Tensor:
    return runner.logits([StepShare(token_ids=ids, start=0, block_table=tuple(range(16)), sample=GREEDY)])[0]


@pytest.mark.parametrize(
    ("attention", "backend"), [("auto", CpuSdpa), ("cpu_sdpa", CpuSdpa), ("sdpa_gather", SdpaGather)]
)
def test_the_attention_asked_for_is_what_computes(
    folder: ModelFolder, attention: str, backend: type, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = _load(folder, device="cpu", attention=attention)
    assert isinstance(runner._backend, backend)
    name = "sdpa_gather" if backend is SdpaGather else "cpu_sdpa"
    assert f"loaded as float32 on cpu, attention by {name}: 16 KV blocks" in caplog.text
    expected = plain_logits(tiny_model("Llama"), IDS, 256)[-1]
    assert torch.allclose(_last_logits(runner, IDS), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"attention": "torch_varlen", "device": "cpu"},
            "--attention torch_varlen cannot .* needs a CUDA device, not cpu",
        ),
        ({"attention": "flash"}, "attention 'flash' is not known; give auto, cpu_sdpa or torch_varlen or sdpa_gather"),
        ({"device": "npu"}, "device 'npu' is not known"),
    ],
)
def test_what_cannot_be_is_refused(folder: ModelFolder, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(folder, **settings)


def test_cuda_asked_for_and_not_there_is_refused_before_weights_are_read(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("worker.model_runner.load_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="--device is cuda, but torch"):
        _load(folder, device="cuda")


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """64 positions before its rope stretches, 256 after."""
    return ModelFolder.open(write_model(tiny_model("Phi3, longrope"), tmp_path_factory.mktemp("models") / "long"))


@pytest.mark.parametrize(("max_model_len", "beside"), [(None, 256), (65, 65), (64, 64)])
def test_frequencies_are_those_of_the_longest_sequence(
    longrope: ModelFolder, max_model_len: int | None, beside: int
) -> None:
    runner = _load(longrope, max_model_len=max_model_len)
    assert runner.limits.max_model_len == beside
    expected = plain_logits(tiny_model("Phi3, longrope"), IDS, beside)[-1]
    assert torch.allclose(_last_logits(runner, IDS), expected, atol=1e-5)


def test_a_rope_that_could_not_be_frozen_is_refused(longrope: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.model_runner.freeze_rope", lambda _model, _max_model_len: None)
    with pytest.raises(ConfigError, match=r"changes by .* beside a sequence of 256 tokens"):
        _load(longrope)
    assert _load(longrope, max_model_len=64).limits.max_model_len == 64


def test_a_folder_is_loaded_onto_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be seen here: the weights are asked to go there."""
    asked: list[torch.device] = []

    def load(_folder: ModelFolder, _dtype: torch.dtype, device: torch.device) -> None:
        asked.append(device)
        raise ConfigError("no device here")

    folder = ModelFolder.open(write_model(tiny_model("Llama"), tmp_path))
    monkeypatch.setattr("worker.model_runner.load_model", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    with pytest.raises(ConfigError, match="no device here"):
        _load(folder)
    assert asked == [torch.device("cuda", 0)]
