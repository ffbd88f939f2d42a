"""A whole step on a device that is not the CPU, without one: fake tensors know where they are and are not mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from tests.support.packed_steps import GREEDY
from tests.support.tiny_models import tiny_model
from worker.attention import self_test
from worker.attention.backend import AttentionBackend
from worker.attention.cpu_sdpa import CpuSdpa
from worker.attention.sdpa_gather import SdpaGather
from worker.attention.torch_varlen import TorchVarlen
from worker.kv_cache import KVCache, KVShape
from worker.model_runner import TorchRunner
from worker.runner import StepShare

ELSEWHERE = torch.device("meta")
SHARES = [
    StepShare(token_ids=[5, 6, 7], start=0, block_table=(0,), sample=GREEDY),
    StepShare(token_ids=[8], start=20, block_table=(1, 2), sample=GREEDY),
    StepShare(token_ids=[9, 10], start=4, block_table=(3,), sample=None),
]


def _logits(
    make: Callable[[KVCache], AttentionBackend], family: str, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    model: Any = tiny_model(family)
    model.to(dtype)
    shapes = self_test.examine(model).shapes
    model.to(ELSEWHERE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        cache = KVCache(KVShape(layers=shapes, dtype=dtype, block_size=16), 4, ELSEWHERE)
        runner = TorchRunner(model, cache, max_model_len=64, threads=1, backend=make(cache))
        return runner.logits(SHARES)


def _checked_varlen_attn(*positional: Any, **named: Any) -> Any:
    """torch's own function; its fake kernel takes tensors from anywhere."""
    tensors = [each for each in (*positional, *named.values()) if isinstance(each, torch.Tensor)]
    assert {tensor.device for tensor in tensors} == {ELSEWHERE}
    return varlen_attn(*positional, **named)


def _varlen(*, reads_blocks: bool) -> Callable[[KVCache], AttentionBackend]:
    return lambda cache: TorchVarlen(cache, varlen_attn=_checked_varlen_attn, reads_blocks=reads_blocks)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize(
    "make", [SdpaGather, _varlen(reads_blocks=False), _varlen(reads_blocks=True)], ids=["gather", "varlen", "paged"]
)
def test_every_tensor_of_a_step_is_where_the_model_is(make: Callable[[KVCache], AttentionBackend], family: str) -> None:
    logits = _logits(make, family)
    assert logits.device == ELSEWHERE
    assert logits.shape == (2, 512)


def test_a_tensor_left_in_main_memory_would_show() -> None:
    """The backend for CPUs keeps its tables there."""
    with pytest.raises(RuntimeError, match="device"):
        _logits(CpuSdpa, "Llama", torch.float32)
