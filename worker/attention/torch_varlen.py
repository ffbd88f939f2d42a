"""Attention on CUDA: one call of torch's variable length flash attention a layer, over all sequences of the step.

    rows    [ A A A | B | D D D ]            cu_rows  0 3 4 7
    keys    [ A A A | B B B B B B | D .. ]   cu_keys  0 3 9 ..     every sequence's keys in sight, gathered

Rows are aligned with the ends of their keys, so a chunk after cached KV is masked rightly. The kernel that torch itself
brings reads no block table, so keys are gathered, unless all sequences are fresh: then they are the layer's own. Where
FlashAttention 3 is installed and the GPU is one for it (Hopper), blocks are read in place through the block table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from worker.attention.backend import AttentionCall, Examination
from worker.attention.step_layout import SequenceRows, StepLayout
from worker.kv_cache import KVCache

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256  # flash attention 2: at most this, in steps of _HEAD_DIM_STEP
_HEAD_DIM_STEP = 8
_LEAST_CAPABILITY = (8, 0)  # Ampere
_FA3_CAPABILITY_MAJOR = 9  # Hopper
_FA3_MODULE = "flash_attn_interface"
"""The module of FlashAttention 3's own wheel, which torch looks for under this name."""

VarlenAttention = Callable[..., Any]
"""`torch.nn.attention.varlen.varlen_attn`, or what has its signature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """What the kernel is told of a step: made by the first layer with this window, used by all others."""

    cu_rows: Tensor  # [num_sequences + 1] int32, where each sequence's rows begin
    cu_keys: Tensor | None  # [num_sequences + 1] int32, where its keys begin; None where blocks are read in place
    most_rows: int
    most_keys: int
    key_slots: Tensor | None  # [keys of all sequences] int64; None where the rows' own keys are all there are
    paging: Mapping[str, Tensor]
    """`seqused_k` [num_sequences] and `block_table` [num_sequences, most blocks of any], int32; empty where keys are
    gathered."""


class TorchVarlen:
    """AttentionBackend over a KVCache in the memory of a CUDA device."""

    def __init__(
        self, cache: KVCache, *, varlen_attn: VarlenAttention = varlen_attn, reads_blocks: bool | None = None
    ) -> None:
        """By default torch's own function, and blocks are read in place where its kernel can."""
        self._cache = cache
        self._varlen_attn = varlen_attn
        self._reads_blocks = _activate_fa3(cache.device) if reads_blocks is None else reads_blocks
        self._step: StepLayout | None = None
        self._tables: dict[int | None, _Tables] = {}

    def attend(self, call: AttentionCall, step: StepLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = self._cache.layers[call.layer]
        queries, keys, values = (rows[0, :, : step.num_rows].transpose(0, 1) for rows in (query, key, value))
        layer.write(step.slots, keys, values)
        tables = self._tables_of(step, call.sliding_window)
        if tables.paging:
            keys, values = layer.keys, layer.values
        elif tables.key_slots is not None:
            keys, values = layer.gather_slots(tables.key_slots)
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        out[0, : step.num_rows] = self._varlen_attn(
            queries,
            keys,
            values,
            tables.cu_rows,
            tables.cu_keys,
            tables.most_rows,
            tables.most_keys,
            scale=call.scaling,
            window_size=(-1 if call.sliding_window is None else call.sliding_window - 1, 0),
            enable_gqa=True,
            **tables.paging,
        )
        return out

    def _tables_of(self, step: StepLayout, window: int | None) -> _Tables:
        if step is not self._step:
            self._step, self._tables = step, {}
        if window not in self._tables:
            make = _paged_tables if self._reads_blocks else _gathered_tables
            self._tables[window] = make(step, window, self._cache.device)
        return self._tables[window]


def obstacle(examination: Examination, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this backend cannot serve such a model; None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    for layer, call in examination.calls.items():
        if call.softcap is not None:
            return f"layer {layer} caps its scores (softcap {call.softcap:g})"
        if call.sinks is not None:
            return f"layer {layer} has attention sinks"
    for layer, shape in examination.shapes.items():
        if shape.key_dim != shape.value_dim:
            return f"layer {layer} has keys of {shape.key_dim} and values of {shape.value_dim} dimensions"
        if shape.key_dim > _MOST_HEAD_DIM or shape.key_dim % _HEAD_DIM_STEP:
            return (
                f"layer {layer} has heads of {shape.key_dim} dimensions, not a multiple of {_HEAD_DIM_STEP} "
                f"up to {_MOST_HEAD_DIM}"
            )
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, less than 8.0"
    return None


# --- tables -----------------------------------------------------------------------------------------------


def _gathered_tables(step: StepLayout, window: int | None, device: torch.device) -> _Tables:
    sequences = step.sequences
    first_keys = [sequence.first_key(window) for sequence in sequences]
    counts = [sequence.end - first for sequence, first in zip(sequences, first_keys, strict=True)]
    slots = [_key_slots(*pair, step.block_size) for pair in zip(sequences, first_keys, strict=True)]
    is_fresh = all(sequence.start == 0 for sequence in sequences)
    return _Tables(
        cu_rows=_starts([sequence.num_rows for sequence in sequences]).to(device),
        cu_keys=_starts(counts).to(device),
        most_rows=max(sequence.num_rows for sequence in sequences),
        most_keys=max(counts),
        key_slots=None if is_fresh else torch.cat(slots).to(device),
        paging={},
    )


def _paged_tables(step: StepLayout, _window: int | None, device: torch.device) -> _Tables:
    """The kernel itself passes over keys out of sight."""
    sequences = step.sequences
    ends = [sequence.end for sequence in sequences]
    block_table = torch.zeros(len(sequences), max(len(sequence.blocks) for sequence in sequences), dtype=torch.int32)
    for row, sequence in zip(block_table, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    return _Tables(
        cu_rows=_starts([sequence.num_rows for sequence in sequences]).to(device),
        cu_keys=None,
        most_rows=max(sequence.num_rows for sequence in sequences),
        most_keys=max(ends),
        key_slots=None,
        paging={
            "seqused_k": torch.tensor(ends, dtype=torch.int32).to(device),
            "block_table": block_table.to(device),
        },
    )


def _starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def _key_slots(sequence: SequenceRows, first_key: int, block_size: int) -> Tensor:
    """[end - first_key] slots of the keys that the sequence's rows can see."""
    keys = torch.arange(first_key, sequence.end)
    return sequence.blocks[keys // block_size] * block_size + keys % block_size


# --- the kernel -------------------------------------------------------------------------------------------


def _activate_fa3(device: torch.device) -> bool:
    """Whether torch calls FlashAttention 3 from here on, which reads a block table with blocks of any size."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _FA3_CAPABILITY_MAJOR:
        return False
    if find_spec(_FA3_MODULE) is None:
        return False
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logger.warning("%s is installed but cannot be used, keys are gathered instead: %s", _FA3_MODULE, error)
        return False
    return True
