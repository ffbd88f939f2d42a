"""Safetensors files of zeros, written without the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape by the name of the tensor."""

STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1, "I32": 4}


def write_weights(path: Path, tensors: Shapes, *, cut: int = 0) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = STORED_BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end - cut))
    return path
