"""How much memory the weights of a model take once they are loaded, from the heads of their files alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from prefixcache.model_files import StoredTensor, WeightsFile, text_config, weight_paths

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Stored types that the worker turns into the type it computes in; others stay as they are."""

_HEAD = "lm_head.weight"


def weights_bytes(folder: Path, config: Mapping[str, Any], element_bytes: int) -> int:
    """Bytes of the weights in `folder`, floats in `element_bytes` each.

    Raises ConfigError for a folder without safetensors weights, or with broken ones.
    """
    tied = bool(text_config(config).get("tie_word_embeddings"))
    return sum(
        prod(tensor.shape) * element_bytes
        if tensor.dtype in _FLOATS
        else tensor.data_offsets[1] - tensor.data_offsets[0]
        for name, tensor in _stored(folder)
        if not (tied and name == _HEAD)  # a copy of the embeddings, which are loaded once
    )


def _stored(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    for path in weight_paths(folder):
        yield from WeightsFile.open(path).tensors.items()
