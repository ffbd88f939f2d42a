"""A folder with a model: its identity, limits and stop tokens, read without loading a tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prefixcache.errors import ConfigError
from prefixcache.rendering.tokenizer_files import TokenizerFiles

_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The limit of the safetensors format itself."""

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
"""Weights are sampled into the revision: a fine-tune has the same config, headers and sizes as its base."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_turn|>")
"""Tokens that end the assistant's turn even where no file declares them (the list that llama.cpp keeps, without those
that can stand inside an answer, such as harmony's <|end|>)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A causal language model in Hugging Face layout with safetensors weights."""

    path: Path
    name: str
    """The folder's own name."""
    revision: str
    """16 hex digits over config, weight headers, weight sizes and samples of the weights."""
    tokenizer_files: TokenizerFiles
    stop_token_ids: tuple[int, ...]
    """Every id that generation config, config, tokenizer or chat template call the end of an answer."""
    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def open(cls, path: str | Path) -> ModelFolder:
        """Reads the folder; some milliseconds and no weights. Raises ConfigError naming what is wrong with it."""
        folder = Path(path).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"model folder {folder} does not exist or is not a folder")
        config = _read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        tokenizer_files = TokenizerFiles.from_folder(folder)
        return cls(
            path=folder,
            name=folder.name,
            revision=_revision(folder),
            tokenizer_files=tokenizer_files,
            stop_token_ids=_stop_token_ids(folder, generation, config, tokenizer_files.files),
            vocab_size=_positive(folder, config, ("vocab_size",)),
            max_position_embeddings=_positive(
                folder,
                config,
                ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"),
            ),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model folder {path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config; multimodal families nest it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _positive(folder: Path, config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The first of `keys` that the config has; families name the same thing differently."""
    text_config = _text_config(config)
    for key in keys:
        value = text_config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{folder / 'config.json'}: {key} is {value!r}, not a positive integer")
        return value
    raise ConfigError(f"{folder / 'config.json'} has none of {', '.join(keys)}; add {keys[0]} to it")


# --- revision ---------------------------------------------------------------------------------------------


def _revision(folder: Path) -> str:
    digest = hashlib.sha256()
    _add(digest, b"config.json", (folder / "config.json").read_bytes())
    for weights in _weight_files(folder):
        for item in (weights.name.encode(), *_fingerprints(weights)):
            _add(digest, item)
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, *items: bytes) -> None:
    for item in items:
        digest.update(len(item).to_bytes(8, "little"))
        digest.update(item)


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, in the order of preference that transformers has."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        raise ConfigError(
            f"model folder {folder} has neither model.safetensors nor model.safetensors.index.json; "
            "other formats must be converted to safetensors first"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise ConfigError(f"{index} has no usable weight_map")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"model folder {folder} lacks {', '.join(missing)}, which {index.name} names")
    return files


def _fingerprints(weights: Path) -> Iterable[bytes]:
    """Size, header and samples of one safetensors file: u64 length of a JSON header, the header, then tensors."""
    try:
        size = weights.stat().st_size
        with weights.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 + header_bytes or not 2 <= header_bytes <= _MAX_HEADER_BYTES:
                raise ConfigError(f"{weights} is cut short or no safetensors file ({size} bytes)")
            parts = [size.to_bytes(8, "little"), file.read(header_bytes)]
            _check_extent(weights, parts[1], size - 8 - header_bytes)
            stride = max(_SAMPLE_BYTES, (size - 8 - header_bytes) // _NUM_SAMPLES)
            for offset in range(8 + header_bytes, size, stride):
                file.seek(offset)
                parts.append(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{weights} cannot be read: {error}") from error
    return parts


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def _check_extent(weights: Path, header: bytes, data_bytes: int) -> None:
    """A download that broke off keeps a sound header; the tensors then end after the file does."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        ends = [msgspec.json.decode(entry, type=_Tensor).data_offsets[1] for entry in entries.values()]
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{weights} has a broken safetensors header: {error}") from error
    if max(ends, default=0) != data_bytes:
        raise ConfigError(
            f"{weights} holds {data_bytes} bytes of tensors, its header {max(ends, default=0)}: cut short?"
        )


# --- stop tokens ------------------------------------------------------------------------------------------


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _stop_token_ids(
    folder: Path, generation: Mapping[str, Any], config: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[int, ...]:
    ids = [
        *_declared_ids(folder / "generation_config.json", generation),
        *_declared_ids(folder / "config.json", _text_config(config)),
        *_tokenizer_stop_ids(folder, files),
    ]
    return tuple(dict.fromkeys(ids))


def _declared_ids(path: Path, content: Mapping[str, Any]) -> list[int]:
    declared = content.get("eos_token_id")
    ids = [] if declared is None else declared if isinstance(declared, list) else [declared]
    if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in ids):
        raise ConfigError(f"{path}: eos_token_id is {declared!r}, not an id or a list of ids")
    return ids


def _tokenizer_stop_ids(folder: Path, files: Mapping[str, bytes]) -> list[int]:
    """Ids of the tokenizer's eos token and of the turn ends that its chat template writes."""
    try:
        tokenizer = msgspec.json.decode(files["tokenizer.json"], type=_Tokenizer)
        settings = msgspec.json.decode(files.get("tokenizer_config.json", b"{}"), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"tokenizer of model folder {folder} cannot be read: {error}") from error
    ids = {token.content: token.id for token in tokenizer.added_tokens}
    eos = settings.get("eos_token")
    ends = [eos["content"] if isinstance(eos, dict) and isinstance(eos.get("content"), str) else eos]
    template = files.get("chat_template.jinja", b"").decode("utf-8", "replace") + str(settings.get("chat_template", ""))
    ends += [end for end in _TURN_ENDS if end in template]
    return [ids[end] for end in ends if isinstance(end, str) and end in ids]
