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

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Cohere": _USUAL,
    "Cohere2": {**_USUAL, "sliding_window": WINDOW},
    "DeepseekV3": {
        **_USUAL,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
    },
    "Exaone4": {**_USUAL, "head_dim": 16, "sliding_window": WINDOW},
    "Gemma": {**_USUAL, "head_dim": 16},
    "Gemma2": {**_USUAL, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 20},
    "Gemma3Text": {**_USUAL, "head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "Glm4": {**_USUAL, "head_dim": 16},
    "GPT2": _GPT2_LIKE,
    "GPTBigCode": _GPT2_LIKE,
    "GPTJ": {**_GPT2_LIKE, "rotary_dim": 8},
    "GPTNeoX": _USUAL,
    "GptOss": {**_USUAL, "head_dim": 16, "num_local_experts": 4, "sliding_window": WINDOW},
    "Granite": _USUAL,
    "Llama": _USUAL,
    "Mistral": {**_USUAL, "sliding_window": WINDOW},
    "Mixtral": {**_USUAL, "num_local_experts": 4},
    "Nemotron": _USUAL,
    "Olmo": _USUAL,
    "Olmo2": _USUAL,
    "Olmo3": {**_USUAL, "sliding_window": WINDOW},
    "OPT": {**_USUAL, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "Persimmon": _USUAL,
    "Phi": _USUAL,
    "Phi3": {**_USUAL, "sliding_window": WINDOW},
    "Qwen2": {**_USUAL, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "Qwen3": {**_USUAL, "head_dim": 16},
    "Qwen3Moe": {**_USUAL, **_EXPERTS, "head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1},
    "SmolLM3": _USUAL,
    "StableLm": _USUAL,
    "Starcoder2": {**_USUAL, "sliding_window": WINDOW},
}
"""Families that are served."""

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


def tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A float32 model with eager attention and weights that make its attention matter."""
    settings = {**{**FAMILIES, **REFUSED_FAMILIES}[family], "bos_token_id": 1, "eos_token_id": 2, **overrides}
    config = getattr(transformers, f"{family}Config")(**settings)
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
