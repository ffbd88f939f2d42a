"""Every attention backend as it runs on a machine without CUDA: torch's varlen kernel by its stand-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.support import varlen_stand_in
from worker.attention.backend import AttentionBackend
from worker.attention.cpu_sdpa import CpuSdpa
from worker.attention.sdpa_gather import SdpaGather
from worker.attention.torch_varlen import TorchVarlen
from worker.kv_cache import KVCache


def _gathering(cache: KVCache) -> AttentionBackend:
    return TorchVarlen(cache, varlen_attn=varlen_stand_in.varlen_attn, reads_blocks=False)


def _paged(cache: KVCache) -> AttentionBackend:
    return TorchVarlen(cache, varlen_attn=varlen_stand_in.varlen_attn, reads_blocks=True)


MAKERS: Mapping[str, Callable[[KVCache], AttentionBackend]] = {
    "cpu_sdpa": CpuSdpa,
    "sdpa_gather": SdpaGather,
    "torch_varlen-gathering": _gathering,
    "torch_varlen-paged": _paged,
}
