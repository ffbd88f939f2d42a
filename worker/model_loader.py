"""Loads a causal language model from a folder and knows how long its sequences may become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from prefixcache.cpu import auto_dtype
from prefixcache.errors import ConfigError
from worker.attention.backend import AttentionCall
from worker.config import DEVICES
from worker.kv_cache import CPU
from worker.model_folder import ModelFolder
from worker.packed_linear import pack_linear_layers

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Names that transformers gives to layers whose only state is KV of single tokens, attended to by distance alone."""


def resolve_device(name: str) -> torch.device:
    """The device behind `--device`; auto is the first CUDA device where torch sees one, else the CPU.

    Raises ConfigError for a device that is not there.
    """
    if name not in DEVICES:
        raise ConfigError(f"device {name!r} is not known; give {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    if name == "cuda" and not torch.cuda.is_available():
        finding = "is built without CUDA" if torch.version.cuda is None else "finds no usable CUDA device"
        raise ConfigError(f"--device is cuda, but torch {torch.__version__} {finding}; give --device cpu, or mend that")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", 0)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype behind `--dtype`; auto is bfloat16 where the device multiplies it in hardware."""
    chosen = _auto_dtype(device) if name == "auto" else name
    if chosen not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not known; give auto, {' or '.join(DTYPES)}")
    return DTYPES[chosen]


def _auto_dtype(device: torch.device) -> str:
    if device.type == "cpu":
        return auto_dtype()
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def load_model(folder: ModelFolder, dtype: torch.dtype, device: torch.device = CPU) -> PreTrainedModel:
    """The model with eager attention, in evaluation mode. Never runs code from the folder, never asks the network.

    Raises ConfigError when transformers cannot load it, its weights are incomplete or the device has no room for them.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    loaded: Any  # a pair with output_loading_info, which transformers' annotation does not say
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            folder.path,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError, RuntimeError) as error:
        raise ConfigError(f"model folder {folder.path} cannot be loaded: {type(error).__name__}: {error}") from error
    model: PreTrainedModel
    model, report = loaded
    absent = sorted(report["missing_keys"])
    if absent:
        raise ConfigError(
            f"model folder {folder.path} lacks {len(absent)} weights of {type(model).__name__}, first {absent[0]}: "
            "it is incomplete or of another architecture"
        )
    check_layer_types(model.config, folder.path)
    model.requires_grad_(False).eval()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    try:
        model.to(device)  # type: ignore[arg-type]  # transformers wraps it without its arguments
    except RuntimeError as error:
        raise ConfigError(f"model folder {folder.path} cannot be moved to {device}: {error}") from error
    pack(model)
    return model


def pack(model: PreTrainedModel) -> None:
    """Packs its linear layers, where that can be done, as a forward over a few tokens shows them."""
    few = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    pack_linear_layers(model, lambda: model(input_ids=few, use_cache=False))


def vocab_size(model: PreTrainedModel) -> int:
    """Ids below it are valid input; some configs state another number."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def check_layer_types(config: PreTrainedConfig, path: Path) -> None:
    """Raises ConfigError when the config names layers whose state is not KV alone; `path` stands in the message."""
    others = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - _SERVED_LAYER_TYPES)
    if others:
        raise ConfigError(
            f"model folder {path} has layers of type {', '.join(others)}; "
            "only layers that keep K and V of every token can be cached by prefix"
        )


# --- length -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBound:
    """Sequences up to `tokens` are computed rightly; longer ones are not, for this reason."""

    tokens: int
    reason: str


def check_length(config: PreTrainedConfig, calls: Mapping[int, AttentionCall], max_model_len: int) -> None:
    """Raises ConfigError when sequences of `max_model_len` would pass a bound of the model.

    `calls` holds what each layer asked of its attention function.
    """
    bounds = _window_bounds(config.get_text_config(), calls)
    bound = min(bounds, key=lambda bound: bound.tokens, default=None)
    if bound is not None and max_model_len > bound.tokens:
        raise ConfigError(
            f"maximum model length {max_model_len:,} is too long for this model: {bound.reason}; "
            f"set the maximum model length to {bound.tokens:,} or less"
        )


def _window_bounds(config: PreTrainedConfig, calls: Mapping[int, AttentionCall]) -> Iterator[LengthBound]:
    """Layers that should attend to fewer keys than they tell their attention function."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    for layer, call in calls.items():
        windowed = types[layer] == "sliding_attention" if types else True
        if window and windowed and call.sliding_window is None:
            yield LengthBound(
                tokens=int(window), reason=f"layer {layer} does not apply its sliding window of {int(window):,} tokens"
            )
