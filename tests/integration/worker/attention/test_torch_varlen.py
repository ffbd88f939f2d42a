"""TorchVarlen's call: held to the function that is installed, and that it makes its tables once a step.

The numbers are compared in test_backends.py, through a stand-in with the signature checked here.
"""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from tests.support import varlen_stand_in
from tests.support.attention_worlds import BLOCK_SIZE, attention_call
from worker.attention import torch_varlen
from worker.attention.step_layout import StepLayout
from worker.attention.torch_varlen import TorchVarlen
from worker.kv_cache import CPU, KVCache, KVShape, LayerShape
from worker.runner import StepShare

CUDA = torch.device("cuda")
SHAPE = KVShape(
    layers=dict.fromkeys((0, 1), LayerShape(num_kv_heads=2, key_dim=8, value_dim=8)),
    dtype=torch.float32,
    block_size=BLOCK_SIZE,
)


def test_the_stand_in_has_the_installed_signature() -> None:
    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        return [(name, each.kind, each.default) for name, each in inspect.signature(function).parameters.items()]

    assert parameters(varlen_stand_in.varlen_attn) == parameters(varlen.varlen_attn)
    shown = inspect.getdoc(varlen.varlen_attn) or ""
    for meaning in ("or (W, 0) for causal attention with sliding window of size W", "dtype ``int32``"):
        assert meaning in shown


class _Kernel:
    """Notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[inspect.BoundArguments] = []

    def __call__(self, *positional: Any, **named: Any) -> torch.Tensor:
        self.calls.append(inspect.signature(varlen.varlen_attn).bind(*positional, **named))
        return varlen_stand_in.varlen_attn(*positional, **named)


def _step(*spans: tuple[int, int]) -> StepLayout:
    shares = [
        StepShare(token_ids=[0] * (end - start), start=start, block_table=(3 * place, 3 * place + 2), sample=None)
        for place, (start, end) in enumerate(spans)
    ]
    return StepLayout.pack(shares, BLOCK_SIZE)


def _attend(backend: TorchVarlen, step: StepLayout, *, layer: int = 0, window: int | None = None) -> None:
    rows = len(step.positions)
    call = attention_call(window=window)
    call = type(call)(layer=layer, scaling=call.scaling, sliding_window=call.sliding_window, softcap=None, sinks=None)
    backend.attend(call, step, torch.randn(1, 4, rows, 8), torch.randn(1, 2, rows, 8), torch.randn(1, 2, rows, 8))


def test_tables_are_made_once_a_step_and_window() -> None:
    kernel = _Kernel()
    backend = TorchVarlen(KVCache(SHAPE, 8), varlen_attn=kernel, reads_blocks=False)
    step = _step((0, 3), (5, 6))
    for layer, window in ((0, None), (1, None), (0, 4), (1, 4)):
        _attend(backend, step, layer=layer, window=window)
    _attend(backend, _step((0, 3), (5, 6)))
    tables = [call.arguments["cu_seq_k"] for call in kernel.calls]
    assert tables[0] is tables[1] and tables[2] is tables[3]
    assert tables[4] is not tables[0]
    assert tables[0].tolist() == [0, 3, 9]
    assert tables[2].tolist() == [0, 3, 7]  # of the second one, keys 2 .. 5 are in sight
    assert [call.arguments["window_size"] for call in kernel.calls] == [(-1, 0), (-1, 0), (3, 0), (3, 0), (-1, 0)]


def test_fresh_sequences_attend_to_their_own_rows_without_a_gather() -> None:
    kernel = _Kernel()
    backend = TorchVarlen(KVCache(SHAPE, 8), varlen_attn=kernel, reads_blocks=False)
    keys = torch.randn(1, 2, 7, 8)
    backend.attend(attention_call(), _step((0, 3), (0, 4)), torch.randn(1, 4, 7, 8), keys, torch.randn(1, 2, 7, 8))
    assert kernel.calls[0].arguments["key"].data_ptr() == keys.data_ptr()


def test_blocks_are_read_in_place_where_the_kernel_can() -> None:
    kernel = _Kernel()
    cache = KVCache(SHAPE, 8)
    backend = TorchVarlen(cache, varlen_attn=kernel, reads_blocks=True)
    _attend(backend, _step((0, 3)))
    _attend(backend, _step((3, 5), (0, 2)), window=2)
    first, second = (call.arguments for call in kernel.calls)
    assert first["key"] is second["key"] is cache.layers[0].keys
    assert second["value"] is cache.layers[0].values
    assert second["block_table"].tolist() == [[0, 2], [3, 0]]
    assert second["seqused_k"].tolist() == [5, 2]
    assert (second["cu_seq_k"], second["max_q"], second["max_k"]) == (None, 2, 5)


class TestFlashAttention3:
    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        monkeypatch.setattr(torch_varlen, "find_spec", lambda _name: SimpleNamespace())

    def test_it_is_activated_where_it_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        activated: list[str] = []
        monkeypatch.setattr(torch_varlen, "activate_flash_attention_impl", activated.append)
        assert torch_varlen._activate_fa3(CUDA)
        assert activated == ["FA3"]
        assert not torch_varlen._activate_fa3(CPU)

    def test_other_gpus_and_machines_without_it_gather(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
        assert not torch_varlen._activate_fa3(CUDA)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        monkeypatch.setattr(torch_varlen, "find_spec", lambda _name: None)
        assert not torch_varlen._activate_fa3(CUDA)

    def test_one_that_cannot_be_loaded_is_told_and_passed_over(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def activate(_name: str) -> None:
            raise ImportError("built for another torch")

        monkeypatch.setattr(torch_varlen, "activate_flash_attention_impl", activate)
        with caplog.at_level(logging.WARNING):
            assert not torch_varlen._activate_fa3(CUDA)
        assert "keys are gathered instead: built for another torch" in caplog.text
