"""A folder with a model: its identity, limits and stop tokens, read without loading a tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prefixcache.errors import ConfigError
from prefixcache.model_files import WeightsFile, max_positions, read_json, required, text_config, weight_paths
from prefixcache.rendering.tokenizer_files import TokenizerFiles

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
        config = read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        tokenizer_files = TokenizerFiles.from_folder(folder)
        return cls(
            path=folder,
            name=folder.name,
            revision=_revision(folder),
            tokenizer_files=tokenizer_files,
            stop_token_ids=_stop_token_ids(folder, generation, config, tokenizer_files.files),
            vocab_size=required(text_config(config), ("vocab_size",), folder / "config.json"),
            max_position_embeddings=max_positions(config, folder / "config.json"),
        )


# --- revision ---------------------------------------------------------------------------------------------


def _revision(folder: Path) -> str:
    digest = hashlib.sha256()
    _add(digest, b"config.json", (folder / "config.json").read_bytes())
    for path in weight_paths(folder):
        for item in (path.name.encode(), *_fingerprints(WeightsFile.open(path))):
            _add(digest, item)
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, *items: bytes) -> None:
    for item in items:
        digest.update(len(item).to_bytes(8, "little"))
        digest.update(item)


def _fingerprints(weights: WeightsFile) -> Iterable[bytes]:
    """Size, header and samples of one file."""
    parts = [weights.size_bytes.to_bytes(8, "little"), weights.header]
    stride = max(_SAMPLE_BYTES, (weights.size_bytes - weights.data_start) // _NUM_SAMPLES)
    try:
        with weights.path.open("rb") as file:
            for offset in range(weights.data_start, weights.size_bytes, stride):
                file.seek(offset)
                parts.append(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{weights.path} cannot be read: {error}") from error
    return parts


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
        *_declared_ids(folder / "config.json", text_config(config)),
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
