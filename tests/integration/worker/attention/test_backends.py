"""One suite for every attention backend: each row attends to its own keys, whatever stands beside it in the step."""

from __future__ import annotations

import logging

import pytest
import torch

from prefixcache.errors import ConfigError
from tests.support.attention_makers import MAKERS
from tests.support.attention_worlds import NUM_HEADS, attention_call, largest_difference, random_spans
from tests.support.seeds import seeded
from worker.attention.backend import AttentionCall, Examination
from worker.attention.backends import BACKENDS, choose_backend
from worker.config import ATTENTIONS
from worker.kv_cache import CPU, LayerShape

CUDA = torch.device("cuda")


CALLS = {
    "plain": attention_call(),
    "scaling": attention_call(scaling=1.0),
    "window-1": attention_call(window=1),
    "window-5": attention_call(window=5),
    "softcap": attention_call(softcap=2.0),
    "sinks": attention_call(sinks=torch.linspace(-2, 2, NUM_HEADS)),
    "all": attention_call(window=3, softcap=1.5, sinks=torch.linspace(0, 1, NUM_HEADS)),
}
SHAPES = {
    "grouped": LayerShape(num_kv_heads=2, key_dim=8, value_dim=8),
    "single": LayerShape(num_kv_heads=1, key_dim=8, value_dim=8),
    "narrow-values": LayerShape(num_kv_heads=6, key_dim=8, value_dim=5),
}
MIXED = [(0, 7), (9, 10), (6, 11), (0, 1), (4, 5), (8, 12)]


def _examination(call: AttentionCall, shape: LayerShape) -> Examination:
    return Examination(calls={0: call}, shapes={0: shape})


def _can(name: str, call: AttentionCall, shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the backend takes on such a model, on the device that it is for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    choice = BACKENDS[name.split("-")[0]]
    device = CUDA if choice.name == "torch_varlen" else CPU
    return choice.obstacle(_examination(call, shape), torch.bfloat16, device) is None


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", MAKERS)
def test_every_row_attends_to_its_own_keys(
    name: str, call: AttentionCall, shape: LayerShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _can(name, call, shape, monkeypatch):
        return
    source = seeded(f"{name} {call} {shape}")
    for spans in (MIXED, [(13, 14)], [(0, 9)], [(5, 6)] * 4, *(random_spans(source) for _ in range(6))):
        difference = largest_difference(MAKERS[name], call, shape, spans, source)
        assert difference < 1e-5, spans


@pytest.mark.parametrize("name", MAKERS)
def test_rows_of_nobody_are_passed_over(name: str) -> None:
    """They pad a step; a prefill, a decode and a chunk stand before them."""
    source = seeded(name)
    for spans in ([(0, 5)], [(6, 7)], MIXED):
        assert (
            largest_difference(MAKERS[name], CALLS["plain"], SHAPES["grouped"], spans, source, num_padding_rows=3)
            < 1e-5
        )


@pytest.mark.parametrize("name", MAKERS)
def test_bfloat16_is_off_by_its_rounding_alone(name: str) -> None:
    source = seeded(name)
    difference = largest_difference(
        MAKERS[name], CALLS["window-5"], SHAPES["grouped"], MIXED, source, dtype=torch.bfloat16
    )
    assert 0 < difference < 0.04


class TestChoice:
    PLAIN = _examination(CALLS["plain"], SHAPES["grouped"])

    def test_the_names_are_those_of_the_setting(self) -> None:
        assert ATTENTIONS == ("auto", *BACKENDS)
        assert all(choice.name == name for name, choice in BACKENDS.items())

    def test_auto_takes_the_fastest_that_can(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
        assert choose_backend("auto", self.PLAIN, torch.float32, CPU).name == "cpu_sdpa"
        assert choose_backend("auto", self.PLAIN, torch.bfloat16, CUDA).name == "torch_varlen"
        with caplog.at_level(logging.INFO):
            capped = _examination(CALLS["softcap"], SHAPES["grouped"])
            assert choose_backend("auto", capped, torch.bfloat16, CUDA).name == "sdpa_gather"
        assert "cannot be computed by torch_varlen: layer 0 caps its scores (softcap 2)" in caplog.text

    @pytest.mark.parametrize("device", [CPU, CUDA])
    def test_the_reference_serves_everything(self, device: torch.device) -> None:
        for call in CALLS.values():
            for shape in SHAPES.values():
                found = choose_backend("sdpa_gather", _examination(call, shape), torch.float32, device)
                assert found.name == "sdpa_gather"

    @pytest.mark.parametrize(
        ("name", "call", "shape", "dtype", "device", "message"),
        [
            ("cpu_sdpa", "plain", (2, 8, 8), torch.float32, CUDA, "it needs the CPU, not cuda; leave it away"),
            ("torch_varlen", "plain", (2, 8, 8), torch.bfloat16, CPU, "it needs a CUDA device, not cpu"),
            ("torch_varlen", "plain", (2, 8, 8), torch.float32, CUDA, "in bfloat16 or float16, not in float32"),
            ("torch_varlen", "softcap", (2, 8, 8), torch.bfloat16, CUDA, r"layer 0 caps its scores \(softcap 2\)"),
            ("torch_varlen", "sinks", (2, 8, 8), torch.bfloat16, CUDA, "layer 0 has attention sinks"),
            ("torch_varlen", "plain", (2, 24, 16), torch.bfloat16, CUDA, "keys of 24 and values of 16 dimensions"),
            ("torch_varlen", "plain", (2, 12, 12), torch.bfloat16, CUDA, "heads of 12 dimensions, not a multiple of 8"),
            ("torch_varlen", "plain", (2, 264, 264), torch.bfloat16, CUDA, "heads of 264 dimensions"),
        ],
    )
    def test_what_a_backend_cannot_do_is_refused_by_name(
        self,
        name: str,
        call: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        message: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        heads, key_dim, value_dim = shape
        examination = _examination(CALLS[call], LayerShape(num_kv_heads=heads, key_dim=key_dim, value_dim=value_dim))
        with pytest.raises(ConfigError, match=f"--attention {name} cannot serve this model here: .*{message}"):
            choose_backend(name, examination, dtype, device)

    def test_an_old_gpu_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
        with pytest.raises(ConfigError, match=r"compute capability 7\.5, less than 8\.0"):
            choose_backend("torch_varlen", self.PLAIN, torch.bfloat16, CUDA)

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="attention 'flex' is not known; give auto, cpu_sdpa or torch_varlen"):
            choose_backend("flex", self.PLAIN, torch.float32, CPU)
