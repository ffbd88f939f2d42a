"""Reads a GGUF file: metadata, tensor directory, and the dequantised tensors, with numpy alone.

    "GGUF" | version u32 | tensors u64 | metadata u64 | metadata entries | tensor infos | padding | tensor data

Layout and the quantised block formats: the GGUF specification of the ggml project. Only what the demo model's file uses
is read: F32, Q4_1 and Q8_0 tensors.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.errors import ConfigError

FloatArray = npt.NDArray[np.float32]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_F32, _Q4_1, _Q8_0 = 0, 3, 8
_QUANT_BLOCK = 32
"""Weights that share one scale in Q4_1 and Q8_0."""
_Q4_1_BYTES = 20
"""f16 scale, f16 minimum, 16 bytes of two nibbles."""
_Q8_0_BYTES = 34
"""f16 scale, 32 signed bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One entry of the tensor directory; `shape` is in numpy order (outermost first)."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        (value,) = struct.unpack_from(layout, self._data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        raw = self._data[self.position : self.position + size]
        self.position += size
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if item_kind not in _SCALARS:
                return [self.value(item_kind) for _ in range(count)]
            layout = f"<{count}{_SCALARS[item_kind]}"
            values = struct.unpack_from(layout, self._data, self.position)
            self.position += struct.calcsize(layout)
            return list(values)
        return self.scalar(_SCALARS[kind])


class GgufFile:
    """An opened GGUF file. Raises ConfigError for anything that is not one."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:4] != _MAGIC:
            raise ConfigError(f"{path} is not a GGUF file: it begins with {self._data[:4]!r}")
        try:
            self._read_header()
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the GGUF header is broken ({error!r})") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        cursor.position = len(_MAGIC)
        cursor.scalar("I")  # version
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.scalar("I"))
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = cursor.string()
            dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            kind, offset = cursor.scalar("I"), cursor.scalar("Q")
            self.tensors[name] = TensorInfo(shape=tuple(reversed(dimensions)), kind=kind, offset=offset)
        alignment = self.metadata.get("general.alignment", 32)
        self._data_start = -(-cursor.position // alignment) * alignment

    def tensor(self, name: str) -> FloatArray:
        """The tensor as float32."""
        info = self.tensors[name]
        count = int(np.prod(info.shape))
        start = self._data_start + info.offset
        if info.kind == _F32:
            flat: FloatArray = np.frombuffer(self._data, np.float32, count, start)
        elif info.kind == _Q4_1:
            flat = self._dequantise_q4_1(count, start)
        elif info.kind == _Q8_0:
            flat = self._dequantise_q8_0(count, start)
        else:
            raise ConfigError(f"tensor {name} has GGUF type {info.kind}; only F32, Q4_1 and Q8_0 are read")
        return flat.reshape(info.shape)

    def _quantised_rows(self, count: int, start: int, width: int) -> npt.NDArray[np.uint8]:
        num_blocks = count // _QUANT_BLOCK
        return np.frombuffer(self._data, np.uint8, num_blocks * width, start).reshape(num_blocks, width)

    def _dequantise_q4_1(self, count: int, start: int) -> FloatArray:
        rows = self._quantised_rows(count, start, _Q4_1_BYTES)
        scale_and_minimum = rows[:, :4].copy().view(np.float16).astype(np.float32)
        nibbles = rows[:, 4:]
        weights = np.empty((len(rows), _QUANT_BLOCK), np.float32)
        weights[:, :16] = nibbles & 15
        weights[:, 16:] = nibbles >> 4
        weights *= scale_and_minimum[:, :1]
        weights += scale_and_minimum[:, 1:]
        return weights.reshape(-1)

    def _dequantise_q8_0(self, count: int, start: int) -> FloatArray:
        rows = self._quantised_rows(count, start, _Q8_0_BYTES)
        scale = rows[:, :2].copy().view(np.float16).astype(np.float32)
        weights: FloatArray = rows[:, 2:].view(np.int8).astype(np.float32) * scale
        return weights.reshape(-1)
