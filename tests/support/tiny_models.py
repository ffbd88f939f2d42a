"""Random models of some kilobytes from transformers' own config classes, one entry a family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_tokenizer import tiny_tokenizer_files, write_files

VOCAB_SIZE = 512
NUM_LAYERS = 4
MAX_POSITIONS = 256
WINDOW = 8

_USUAL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
}
_GPT2_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": NUM_LAYERS,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED_EXPERTS = {**_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
_LATENT = {
    **_USUAL,
    **_GROUPED_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Apertus": _USUAL,
    "Arcee": _USUAL,
    "BioGpt": _USUAL,
    "BitNet": _USUAL,
    "CodeGen": {**_GPT2_LIKE, "rotary_dim": 8},
    "Cohere": _USUAL,
    "Cohere2": {**_USUAL, "sliding_window": WINDOW},
    "Cwm": {**_USUAL, "sliding_window": WINDOW},
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "Ernie4_5": _USUAL,
    "Exaone4": {**_USUAL, "head_dim": 16, "sliding_window": WINDOW},
    "Gemma": {**_USUAL, "head_dim": 16},
    "Gemma2": {**_USUAL, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 20},
    "Gemma3Text": {**_USUAL, "head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "Gemma4Text": {
        **_USUAL,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "Glm": {**_USUAL, "head_dim": 16},
    "Glm4": {**_USUAL, "head_dim": 16},
    "Glm4Moe": {**_USUAL, **_GROUPED_EXPERTS},
    "GPT2": _GPT2_LIKE,
    "GPTBigCode": _GPT2_LIKE,
    "GPTJ": {**_GPT2_LIKE, "rotary_dim": 8},
    "GPTNeoX": _USUAL,
    "GptOss": {**_USUAL, "head_dim": 16, "num_local_experts": 4, "sliding_window": WINDOW},
    "Granite": _USUAL,
    "GraniteMoe": {**_USUAL, "num_local_experts": 4},
    "Helium": {**_USUAL, "head_dim": 16},
    "HunYuanDenseV1": {**_USUAL, "head_dim": 16},
    "Llama": _USUAL,
    "Ministral": {**_USUAL, "head_dim": 16, "sliding_window": WINDOW},
    "Ministral3": _USUAL,
    "Mistral": {**_USUAL, "sliding_window": WINDOW},
    "Mixtral": {**_USUAL, "num_local_experts": 4},
    "NanoChat": _USUAL,
    "Nemotron": _USUAL,
    "Olmo": _USUAL,
    "Olmo2": _USUAL,
    "Olmo3": {**_USUAL, "sliding_window": WINDOW},
    "OPT": {**_USUAL, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "Persimmon": _USUAL,
    "Phi": _USUAL,
    "Phi3": {**_USUAL, "sliding_window": WINDOW},
    "Phimoe": {**_USUAL, "num_local_experts": 4},
    "Qwen2": {**_USUAL, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "Qwen2Moe": {**_USUAL, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "Qwen3": {**_USUAL, "head_dim": 16},
    "Qwen3Moe": {**_USUAL, **_EXPERTS, "head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1},
    "SeedOss": {**_USUAL, "head_dim": 16},
    "SmolLM3": _USUAL,
    "StableLm": _USUAL,
    "Starcoder2": {**_USUAL, "sliding_window": WINDOW},
    "VaultGemma": {**_USUAL, "head_dim": 16, "sliding_window": WINDOW},
}
"""Families that are served."""

ORIGINAL_POSITIONS = 64
"""Of the variants whose rope stretches further."""


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **parameters}}


VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama, a KV head for each query head": ("Llama", {"num_key_value_heads": 4}),
    "Llama, one KV head": ("Llama", {"num_key_value_heads": 1}),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, linear rope": ("Llama", _rope("linear", factor=4.0)),
    "Llama, llama3 rope": (
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=ORIGINAL_POSITIONS,
        ),
    ),
    "Llama, yarn rope": (
        "Llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL_POSITIONS),
    ),
    "Mistral, no window": ("Mistral", {"sliding_window": None}),
    "Qwen2, no window": ("Qwen2", {"use_sliding_window": False}),
    "Qwen3, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "Gemma4Text, shared KV": ("Gemma4Text", {"num_kv_shared_layers": 2}),
}
"""Settings of one family that are served."""

STRETCHED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Phi3, longrope": (
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
            **_rope(
                "longrope",
                short_factor=[1.0] * 8,
                long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
                original_max_position_embeddings=ORIGINAL_POSITIONS,
            ),
        },
    ),
    "Llama, dynamic rope": (
        "Llama",
        {"max_position_embeddings": ORIGINAL_POSITIONS, **_rope("dynamic", factor=4.0)},
    ),
    "Gemma3Text, dynamic rope": (
        "Gemma3Text",
        {
            "max_position_embeddings": ORIGINAL_POSITIONS,
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
"""Models whose own forward chooses its rope by the longest sequence in it."""

REFUSED_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": NUM_LAYERS, "n_head": 4},
    "Falcon": _USUAL,
    "FalconH1": {**_USUAL, "head_dim": 16},
    "Lfm2": {**_USUAL, "layer_types": ["conv", "full_attention"] * 2},
    "Llama4Text": {
        **_USUAL,
        "head_dim": 16,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
    },
    "Mamba": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": NUM_LAYERS},
    "Mpt": {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": NUM_LAYERS, "n_heads": 4, "max_seq_len": 256},
    "Qwen3Next": {**_USUAL, "head_dim": 16},
}
"""Families that keep other state than K and V, or bias their scores themselves."""


def tiny_model(name: str, **overrides: Any) -> PreTrainedModel:
    """A float32 model of a family or variant, with eager attention and weights that make its attention matter."""
    family, variant = {**VARIANTS, **STRETCHED}.get(name, (name, {}))
    settings = {**FAMILIES, **REFUSED_FAMILIES}[family]
    settings = {**settings, "bos_token_id": 1, "eos_token_id": 2, **variant, **overrides}
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)  # transformers draws biases and sinks, which stay
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
            config, attn_implementation="eager", dtype=torch.float32
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08, generator=generator)
    model.requires_grad_(False).eval()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    return model


def write_model(model: PreTrainedModel, folder: Path) -> Path:
    """A whole model folder with a tiny tokenizer; returns it."""
    model.save_pretrained(folder)
    return write_files(tiny_tokenizer_files(), folder)
