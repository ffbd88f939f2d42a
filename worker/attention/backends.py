"""Which backend computes attention: the one asked for, or the fastest that can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from prefixcache.errors import ConfigError
from worker.attention import torch_varlen
from worker.attention.backend import AttentionBackend, Examination
from worker.attention.cpu_sdpa import CpuSdpa
from worker.attention.sdpa_gather import SdpaGather
from worker.attention.torch_varlen import TorchVarlen
from worker.kv_cache import KVCache

logger = logging.getLogger(__name__)

Obstacle = Callable[[Examination, torch.dtype, torch.device], str | None]
"""Why a backend cannot serve what a model asks for and keeps, in a dtype and on a device; None if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """A backend by its name in `--attention`."""

    name: str
    make: Callable[[KVCache, Examination], AttentionBackend]
    obstacle: Obstacle


def _make_cpu_sdpa(cache: KVCache, examination: Examination) -> AttentionBackend:
    return CpuSdpa(cache, examination.wide_layers)


def _make_torch_varlen(cache: KVCache, _examination: Examination) -> AttentionBackend:
    return TorchVarlen(cache)


def _make_sdpa_gather(cache: KVCache, _examination: Examination) -> AttentionBackend:
    return SdpaGather(cache)


def _needs_cpu(_examination: Examination, _dtype: torch.dtype, device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"it needs the CPU, not {device.type}"


def _serves_all(_examination: Examination, _dtype: torch.dtype, _device: torch.device) -> None:
    return None


BACKENDS: Mapping[str, BackendChoice] = {
    choice.name: choice
    for choice in (
        BackendChoice(name="cpu_sdpa", make=_make_cpu_sdpa, obstacle=_needs_cpu),
        BackendChoice(name="torch_varlen", make=_make_torch_varlen, obstacle=torch_varlen.obstacle),
        BackendChoice(name="sdpa_gather", make=_make_sdpa_gather, obstacle=_serves_all),
    )
}
"""Fastest first; the last one serves everything."""


def choose_backend(name: str, examination: Examination, dtype: torch.dtype, device: torch.device) -> BackendChoice:
    """The backend called `name`; `auto` takes the first without an obstacle.

    Raises ConfigError for one that is not known or cannot serve this model here.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"attention {name!r} is not known; give auto, {' or '.join(BACKENDS)}")
    for choice in BACKENDS.values() if name == "auto" else (BACKENDS[name],):
        obstacle = choice.obstacle(examination, dtype, device)
        if obstacle is None:
            return choice
        logger.info("attention cannot be computed by %s: %s", choice.name, obstacle)
    raise ConfigError(
        f"--attention {name} cannot serve this model here: {obstacle}; leave it away to have one chosen that can"
    )
