"""`--kv-memory` as a share: of what is left when the weights are there."""

from __future__ import annotations

import logging

import pytest
import torch

from prefixcache.errors import ConfigError
from prefixcache.memory import MemoryAmount, MemoryShare
from tests.support.tiny_models import tiny_model, write_model
from worker import kv_memory
from worker.kv_memory import free_bytes, kv_memory_bytes, warn_of_excess
from worker.model_folder import ModelFolder
from worker.model_loader import load_model
from worker.model_runner import TorchRunner, load_runner

CPU = torch.device("cpu")
HALF = MemoryShare(percent=50.0)
BYTES_PER_BLOCK = 16 * 4 * 2 * 32 * 4


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the next questions are answered; the last answer stands."""
    answers = [1_000]
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: answers[-1])
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder.open(write_model(tiny_model("Llama"), tmp_path_factory.mktemp("models") / "tiny-llama"))


def load(folder: ModelFolder, memory: MemoryAmount, num_blocks: int | None = None) -> TorchRunner:
    return load_runner(
        folder, dtype="float32", num_blocks=num_blocks, kv_memory=memory, max_model_len=None, threads=1, device="cpu"
    )


def test_a_size_is_itself_and_a_share_is_of_what_is_free(available: list[int]) -> None:
    assert kv_memory_bytes(7, CPU) == 7
    assert kv_memory_bytes(HALF, CPU) == 500
    assert free_bytes(CPU) == 1_000


def test_a_cuda_device_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch, available: list[int]) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000 + device.index, 9_000))
    assert kv_memory_bytes(HALF, torch.device("cuda", 0)) == 4_000


def test_a_share_is_taken_once_the_weights_are_loaded(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, available: list[int]
) -> None:
    def loading(*arguments: object) -> object:
        available.append(20 * BYTES_PER_BLOCK + 2)
        return load_model(*arguments)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr("worker.model_runner.load_model", loading)
    assert load(folder, HALF).limits.num_blocks == 10


def test_a_share_of_too_little_is_refused(folder: ModelFolder, available: list[int]) -> None:
    with pytest.raises(ConfigError, match="500 bytes of KV memory are too few for one block"):
        load(folder, HALF)


def test_a_number_of_blocks_asks_nobody(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not tell what is available, sizes and numbers still work."""

    def nobody_knows() -> int:
        raise ConfigError("nobody knows")

    monkeypatch.setattr(kv_memory, "available_bytes", nobody_knows)
    assert load(folder, HALF, num_blocks=3).limits.num_blocks == 3
    assert load(folder, 5 * BYTES_PER_BLOCK).limits.num_blocks == 5
    with pytest.raises(ConfigError, match="nobody knows"):
        load(folder, HALF)


@pytest.mark.parametrize(("kv_bytes", "warned"), [(1_000, False), (1_001, True)])
def test_a_cache_that_cannot_grow_full_is_warned_of(
    available: list[int], caplog: pytest.LogCaptureFixture, kv_bytes: int, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_excess(kv_bytes, CPU)
    assert ["may grow to 1001 B, but only 1000 B are available" in line for line in caplog.messages] == [True] * warned
