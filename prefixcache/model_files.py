"""Files of a model folder in Hugging Face layout: its config, and the heads of its safetensors weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prefixcache.errors import ConfigError

_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The limit of the safetensors format itself."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model folder {path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


# --- config -----------------------------------------------------------------------------------------------


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config; multimodal families nest it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def stated(config: Mapping[str, Any], keys: tuple[str, ...], path: Path) -> int | None:
    """The first of `keys` that the config has; families name the same thing differently. None where it has none.

    Raises ConfigError for a value that is no positive integer.
    """
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{path}: {key} is {value!r}, not a positive integer")
        return value
    return None


def required(config: Mapping[str, Any], keys: tuple[str, ...], path: Path) -> int:
    """As `stated`, and ConfigError where it has none."""
    value = stated(config, keys, path)
    if value is None:
        raise ConfigError(f"{path} has none of {', '.join(keys)}; add {keys[0]} to it")
    return value


def max_positions(config: Mapping[str, Any], path: Path) -> int:
    """The longest sequence that the model has positions for."""
    return required(text_config(config), _POSITIONS, path)


# --- weights ----------------------------------------------------------------------------------------------


class StoredTensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """One safetensors file: u64 length of a JSON header, the header, then tensors."""

    path: Path
    size_bytes: int
    header: bytes
    tensors: Mapping[str, StoredTensor]

    @property
    def data_start(self) -> int:
        return 8 + len(self.header)

    @classmethod
    def open(cls, path: Path) -> WeightsFile:
        """Reads the header alone. Raises ConfigError for a file that is none or was cut short."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                if size < 8 + header_bytes or not 2 <= header_bytes <= _MAX_HEADER_BYTES:
                    raise ConfigError(f"{path} is cut short or no safetensors file ({size} bytes)")
                header = file.read(header_bytes)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        tensors = _tensors(path, header)
        # A download that broke off keeps a sound header; the tensors then end after the file does.
        end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
        if end != size - 8 - header_bytes:
            raise ConfigError(f"{path} holds {size - 8 - header_bytes} bytes of tensors, its header {end}: cut short?")
        return cls(path=path, size_bytes=size, header=header, tensors=tensors)


def _tensors(path: Path, header: bytes) -> Mapping[str, StoredTensor]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=StoredTensor) for name, entry in entries.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} has a broken safetensors header: {error}") from error


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors weights, whole or not."""
    return (folder / _SINGLE).exists() or (folder / _INDEX).exists()


def weight_paths(folder: Path) -> list[Path]:
    """The files that hold the weights, in the order of preference that transformers has. Raises ConfigError."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists():
        return [single]
    if not index.exists():
        raise ConfigError(
            f"model folder {folder} has neither {_SINGLE} nor {_INDEX}; "
            "other formats must be converted to safetensors first"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise ConfigError(f"{index} has no usable weight_map")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"model folder {folder} lacks {', '.join(missing)}, which {index.name} names")
    return files
