"""What a model keeps of one token in the KV cache, told from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixcache.errors import ConfigError
from prefixcache.model_files import required, stated, text_config

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM = ("head_dim", "kv_channels")

_ALL_HEADS_OWN = frozenset(
    "biogpt bloom codegen ctrl gpt2 gpt_neo gpt_neox gpt_neox_japanese gptj modernbert-decoder mpt openai-gpt opt "
    "persimmon xglm".split()
)
"""Model types whose class in transformers knows no grouped heads: a number of KV heads in their config is not read."""

_KV_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_OTHER_STATE = ("mamba_", "ssm_", "state_size")
"""Beginnings of keys that only configs with a recurrent state have; those with layer types of their own name these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """K and V of one token in one layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """K and V of one token.

    A layer with a sliding window counts like any other: the worker keeps all of its blocks.
    """

    layers: tuple[LayerKV, ...]

    def bytes_per_token(self, element_bytes: int) -> int:
        return element_bytes * sum(layer.num_elements for layer in self.layers)


def kv_layout(config: Mapping[str, Any], path: Path) -> KVLayout:
    """From the content of the config.json at `path`.

    Raises ConfigError where it lacks what is needed, or names state beside K and V.
    """
    whole = text_config(config)
    num_layers = required(whole, _LAYERS, path)
    _check_layer_types(whole, num_layers, path)
    return KVLayout(
        layers=tuple(_layer(_settings(whole, index, num_layers, path), path) for index in range(num_layers))
    )


def _check_layer_types(config: Mapping[str, Any], num_layers: int, path: Path) -> None:
    types = config.get("layer_types") or []
    if types and len(types) < num_layers:
        raise ConfigError(f"{path}: layer_types has {len(types)} entries for {num_layers} layers")
    recurrent = [key for key in config if key.startswith(_OTHER_STATE)]
    found = sorted(f"layers of type {kind}" for kind in {*types} - _KV_LAYER_TYPES) or sorted(recurrent)[:1]
    if found:
        raise ConfigError(
            f"{path} has {', '.join(found)}; only layers that keep K and V of every token, and attend to them by "
            "distance alone, can be cached by prefix and are counted here"
        )


def _settings(config: Mapping[str, Any], index: int, num_layers: int, path: Path) -> Mapping[str, Any]:
    """The config as it is for one layer: some families have layers that differ.

    transformers writes these as `per_layer_config`; older configs list a number for each layer, and those of Gemma 4
    name what layers with full attention have.
    """
    own = {
        key: value[index] if isinstance(value, list) and len(value) == num_layers else value
        for key in _KV_HEADS + _HEAD_DIM
        if (value := config.get(key)) is not None
    }
    overrides = config.get("per_layer_config")
    if isinstance(overrides, dict):
        own |= overrides.get(str(index)) or {}
    elif (config.get("layer_types") or [None] * num_layers)[index] == "full_attention":
        whole_dim = config.get("global_head_dim")
        whole_heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        own |= {"head_dim": whole_dim} if whole_dim is not None else {}
        own |= {"num_key_value_heads": whole_heads} if whole_heads is not None else {}
    return {**config, **own}


def _layer(config: Mapping[str, Any], path: Path) -> LayerKV:
    num_heads = required(config, _HEADS, path)
    if config.get("kv_lora_rank") is not None and config.get("qk_nope_head_dim") is not None:
        # Multi-head latent attention: transformers expands the latent to K and V of every head, and that is cached.
        key_dim = sum(required(config, (key,), path) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
        return LayerKV(num_kv_heads=num_heads, key_dim=key_dim, value_dim=required(config, ("v_head_dim",), path))
    head_dim = stated(config, _HEAD_DIM, path) or _divided(config, num_heads, path)
    return LayerKV(num_kv_heads=_num_kv_heads(config, num_heads, path), key_dim=head_dim, value_dim=head_dim)


def _divided(config: Mapping[str, Any], num_heads: int, path: Path) -> int:
    hidden = required(config, _HIDDEN, path)
    if hidden % num_heads:
        raise ConfigError(f"{path}: a hidden size of {hidden} has no {num_heads} equal heads; add head_dim to it")
    return hidden // num_heads


def _num_kv_heads(config: Mapping[str, Any], num_heads: int, path: Path) -> int:
    """Falcon states a number of KV heads that its multi-query attention does not have."""
    multi_query = config.get("multi_query", config.get("model_type") == "gpt_bigcode")
    if multi_query and not config.get("new_decoder_architecture"):
        return 1
    grouped = None if config.get("model_type") in _ALL_HEADS_OWN else stated(config, _KV_HEADS, path)
    return grouped or num_heads
