from __future__ import annotations

import json
from typing import Any

import pytest

from prefixcache.errors import ConfigError
from prefixcache.rendering.tokenizer_config import TokenizerConfig
from prefixcache.rendering.tokenizer_files import TokenizerFiles


def config_of(config: Any = None, **others: bytes) -> TokenizerConfig:
    names = {"special": "special_tokens_map.json", "template": "chat_template.jinja"}
    files = {"tokenizer.json": b"{}", **{names[name]: content for name, content in others.items()}}
    if config is not None:
        files["tokenizer_config.json"] = config if isinstance(config, bytes) else json.dumps(config).encode()
    return TokenizerConfig.from_files(TokenizerFiles(files=files))


def test_special_tokens_are_strings_objects_and_named_extras() -> None:
    config = config_of(
        {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "pad_token": None,
            "add_bos_token": True,
            "extra_special_tokens": {"image_token": "<image>"},
        }
    )
    assert config.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}


def test_special_tokens_map_counts_only_without_an_added_tokens_decoder() -> None:
    special = json.dumps({"bos_token": {"content": "<b>"}, "additional_special_tokens": ["<x>"]}).encode()
    assert config_of({"bos_token": "<s>"}, special=special).special_tokens == {"bos_token": "<b>"}
    settled = config_of({"bos_token": "<s>", "added_tokens_decoder": {}}, special=special)
    assert settled.special_tokens == {"bos_token": "<s>"}
    assert config_of(special=special).special_tokens == {"bos_token": "<b>"}


def test_where_templates_come_from() -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert config_of().chat_templates == {}
    assert config_of({"chat_template": "one"}).chat_templates == {"default": "one"}
    assert config_of({"chat_template": named}).chat_templates == {"default": "d", "tool_use": "t"}
    assert config_of({"chat_template": named}, template="é".encode()).chat_templates == {"default": "é"}


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"[]", b"\xff", b'"text"'])
def test_a_config_that_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        config_of(content)


@pytest.mark.parametrize("stated", [1, [], {}, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_a_template_of_another_shape_is_refused(stated: Any) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        config_of({"chat_template": stated})


def test_a_template_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        config_of(template=b"\xff")
