"""Writes a Llama-family GGUF file as a plain Hugging Face folder: safetensors, config, tokenizer and chat template."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prefixcache.demo.gguf import FloatArray, GgufFile
from prefixcache.errors import ConfigError

Dtype = Literal["bfloat16", "float32"]
Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL_TOKEN = 3
"""Token type of special tokens in `tokenizer.ggml.token_type`."""


def convert(source: Path, folder: Path, dtype: Dtype, progress: Progress) -> None:
    """Fills the existing `folder` from the GGUF file `source`. Raises ConfigError for another architecture."""
    gguf = GgufFile(source)
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{source} holds a model of architecture {architecture!r}; only 'llama' is converted")
    _write_weights(gguf, folder / "model.safetensors", dtype, progress)
    _write_config(gguf, folder, dtype)
    _write_tokenizer(gguf, folder)


def to_bfloat16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 values, rounded to nearest even as torch does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _hub_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight"
    return f"{_OUTSIDE_LAYERS[parts[0]]}.weight"


def _rows_as_the_hub_orders_them(gguf: GgufFile, name: str) -> FloatArray:
    """GGUF interleaves the two rotary halves of each Q and K head row by row; the hub's layout keeps them apart."""
    weight = gguf.tensor(name)
    kind = name.split(".")[2] if name.startswith("blk.") else ""
    heads = {
        "attn_q": gguf.metadata["llama.attention.head_count"],
        "attn_k": gguf.metadata["llama.attention.head_count_kv"],
    }.get(kind)
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_weights(gguf: GgufFile, path: Path, dtype: Dtype, progress: Progress) -> None:
    width = 2 if dtype == "bfloat16" else 4
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in gguf.tensors.items():
        size = int(np.prod(info.shape)) * width
        header[_hub_name(name)] = {
            "dtype": "BF16" if dtype == "bfloat16" else "F32",
            "shape": list(info.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for done, name in enumerate(gguf.tensors, start=1):
            weight = _rows_as_the_hub_orders_them(gguf, name)
            file.write((to_bfloat16(weight) if dtype == "bfloat16" else np.ascontiguousarray(weight)).data)
            progress(done, len(gguf.tensors))


def _write_config(gguf: GgufFile, folder: Path, dtype: Dtype) -> None:
    metadata = gguf.metadata
    hidden_size = metadata["llama.embedding_length"]
    heads = metadata["llama.attention.head_count"]
    special = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)


def _write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    metadata = gguf.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    def spelled(name: str) -> str | None:
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return None if number is None else tokens[number]

    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": spelled("bos"),
            "eos_token": spelled("eos"),
            "unk_token": spelled("unknown"),
            "pad_token": spelled("padding"),
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
