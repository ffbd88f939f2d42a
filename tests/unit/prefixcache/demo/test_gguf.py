"""Dequantisation against hand-computed values, and files that are not GGUF."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixcache.demo.convert import to_bfloat16
from prefixcache.demo.gguf import GgufFile
from prefixcache.errors import ConfigError


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_gguf(path: Path, tensors: dict[str, tuple[int, tuple[int, ...], bytes]], metadata: bytes = b"") -> None:
    """`tensors`: name -> (GGUF type, shape in numpy order, raw bytes). `metadata`: encoded entries, counted by key."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1 if metadata else 0) + metadata
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        dimensions = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        header += _string(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)


def test_reads_the_three_tensor_types(tmp_path: Path) -> None:
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    q8 = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    q4 = np.float16(2.0).tobytes() + np.float16(-1.0).tobytes() + bytes([0x21] * 16)
    write_gguf(
        tmp_path / "m.gguf",
        {"plain": (0, (2, 3), plain.tobytes()), "q8": (8, (32,), q8), "q4": (3, (1, 32), q4)},
    )
    gguf = GgufFile(tmp_path / "m.gguf")
    np.testing.assert_array_equal(gguf.tensor("plain"), plain)
    np.testing.assert_array_equal(gguf.tensor("q8"), np.arange(-16, 16, dtype=np.float32) * 0.5)
    np.testing.assert_array_equal(gguf.tensor("q4"), np.array([[1.0] * 16 + [3.0] * 16], np.float32))


def test_reads_every_kind_of_metadata(tmp_path: Path) -> None:
    words = struct.pack("<IQ", 8, 2) + _string("a") + _string("ü")
    write_gguf(tmp_path / "m.gguf", {}, _string("words") + struct.pack("<I", 9) + words)
    assert GgufFile(tmp_path / "m.gguf").metadata == {"words": ["a", "ü"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PK\x03\x04 a zip", "is not a GGUF file"), (b"GGUF" + b"\1" * 20, "header is broken")],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        GgufFile(tmp_path / "m.gguf")


def test_an_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"odd": (14, (32,), b"\0" * 64)})
    with pytest.raises(ConfigError, match="tensor odd has GGUF type 14"):
        GgufFile(tmp_path / "m.gguf").tensor("odd")


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (-2.0, 0xC000), (1.0 + 2**-8, 0x3F80), (1.0 + 3 * 2**-8, 0x3F82), (1.0 + 2**-8 + 2**-20, 0x3F81)],
)
def test_bfloat16_rounds_to_nearest_even(value: float, bits: int) -> None:
    converted: Any = to_bfloat16(np.array([value], np.float32))
    assert converted.tolist() == [bits]
