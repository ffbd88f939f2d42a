"""KV of a token from configs as they are published, against what is known of these models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixcache.errors import ConfigError
from prefixcache.planning.kv_layout import LayerKV, kv_layout

PATH = Path("model/config.json")

LLAMA_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12}
FALCON_7B = {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "num_kv_heads": 71}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
GEMMA_4 = {
    "num_hidden_layers": 6,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_global_key_value_heads": 2,
}
TWO_LAYERS = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        (LLAMA_8B, 128 * 1024),
        ({**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}, 320 * 1024),
        ({**LLAMA_8B, "num_key_value_heads": None}, 4 * 128 * 1024),
        ({**LLAMA_8B, "num_key_value_heads": 1}, 16 * 1024),
        ({**LLAMA_8B, "head_dim": 64}, 64 * 1024),
        ({**LLAMA_8B, "head_dim": None}, 128 * 1024),
        ({"vision_config": {"hidden_size": 5}, "hidden_size": 7, "text_config": LLAMA_8B}, 128 * 1024),
        (GPT2, 2 * 12 * 768 * 2),
        ({**GPT2, "multi_query": True}, 2 * 12 * 64 * 2),
        ({**GPT2, "model_type": "gpt_bigcode"}, 2 * 12 * 64 * 2),
        ({**GPT2, "model_type": "gpt_bigcode", "multi_query": False}, 2 * 12 * 768 * 2),
        ({**FALCON_7B, "multi_query": True}, 2 * 32 * 64 * 2),
        ({**FALCON_7B, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 2 * 32 * 8 * 64 * 2),
        ({**LLAMA_8B, "model_type": "opt"}, 4 * 128 * 1024),
        (DEEPSEEK_V3, 61 * 128 * (192 + 128) * 2),
        ({**DEEPSEEK_V3, "kv_lora_rank": None, "head_dim": 128}, 61 * 128 * (128 + 128) * 2),
    ],
)
def test_bytes_of_a_token_in_bfloat16(config: dict[str, Any], bytes_per_token: int) -> None:
    layout = kv_layout(config, PATH)
    assert layout.bytes_per_token(2) == bytes_per_token
    assert layout.bytes_per_token(4) == 2 * bytes_per_token


def layer(num_kv_heads: int, dim: int) -> LayerKV:
    return LayerKV(num_kv_heads=num_kv_heads, key_dim=dim, value_dim=dim)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({**TWO_LAYERS, "num_kv_heads": [1, 2]}, [layer(1, 16), layer(2, 16)]),
        ({**TWO_LAYERS, "num_key_value_heads": [4, 1], "head_dim": [8, 32]}, [layer(4, 8), layer(1, 32)]),
        (
            {**TWO_LAYERS, "per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}}},
            [layer(4, 16), layer(1, 32)],
        ),
        ({**GEMMA_4, "global_head_dim": 512}, [layer(4, 256)] * 5 + [layer(4, 512)]),
        ({**GEMMA_4, "global_head_dim": 512, "attention_k_eq_v": True}, [layer(4, 256)] * 5 + [layer(2, 512)]),
        ({**GEMMA_4, "per_layer_config": {"5": {"head_dim": 128}}}, [layer(4, 256)] * 5 + [layer(4, 128)]),
    ],
)
def test_layers_that_differ(config: dict[str, Any], layers: list[LayerKV]) -> None:
    assert list(kv_layout(config, PATH).layers) == layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"config\.json has none of num_hidden_layers, n_layer.*add num_hidden_layers to it"),
        ({"num_hidden_layers": 2}, r"has none of num_attention_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, r"has none of hidden_size"),
        ({**TWO_LAYERS, "num_hidden_layers": 0}, r"num_hidden_layers is 0, not a positive integer"),
        ({**TWO_LAYERS, "num_key_value_heads": "8"}, r"num_key_value_heads is '8', not a positive integer"),
        (
            {**TWO_LAYERS, "num_key_value_heads": [1, 2, 3]},
            r"num_key_value_heads is \[1, 2, 3\], not a positive integer",
        ),
        ({**TWO_LAYERS, "head_dim": True}, r"head_dim is True, not a positive integer"),
        ({**TWO_LAYERS, "num_attention_heads": 5}, r"a hidden size of 64 has no 5 equal heads; add head_dim to it"),
        ({**TWO_LAYERS, "layer_types": ["full_attention", "conv"]}, r"has layers of type conv; only layers that keep"),
        ({**TWO_LAYERS, "layer_types": ["full_attention"]}, r"layer_types has 1 entries for 2 layers"),
        ({**TWO_LAYERS, "mamba_d_state": 16}, r"has mamba_d_state; only layers that keep K and V"),
        ({**DEEPSEEK_V3, "v_head_dim": None}, r"has none of v_head_dim"),
    ],
)
def test_what_cannot_be_counted_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_layout(config, PATH)
