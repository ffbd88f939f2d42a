"""What tokenizer_config.json and its neighbours say: special tokens by name and the chat templates.

The rules are those of transformers 5: chat_template.jinja wins over the config's own `chat_template`, which is one
template or a list of named ones; special_tokens_map.json counts only where the config has no `added_tokens_decoder`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixcache.errors import ConfigError
from prefixcache.rendering.tokenizer_files import CHAT_TEMPLATE, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, TokenizerFiles

DEFAULT_TEMPLATE = "default"
TOOL_USE_TEMPLATE = "tool_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """The part of the configuration that rendering needs."""

    special_tokens: Mapping[str, str]
    """By name, such as "bos_token": variables of the chat template."""
    chat_templates: Mapping[str, str]
    """Jinja source by name; empty when the model has none."""

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> TokenizerConfig:
        """Raises ConfigError where a file is not what it should be."""
        config = _json_object(files, TOKENIZER_CONFIG)
        special = _special_tokens(config)
        if "added_tokens_decoder" not in config:
            special |= _special_tokens(_json_object(files, SPECIAL_TOKENS_MAP))
        return cls(special_tokens=special, chat_templates=_chat_templates(files, config))


def _json_object(files: TokenizerFiles, name: str) -> dict[str, Any]:
    if name not in files.files:
        return {}
    try:
        content = json.loads(files.files[name])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} must hold a JSON object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= extra
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in contents.items() if isinstance(value, str)}


def _chat_templates(files: TokenizerFiles, config: Mapping[str, Any]) -> dict[str, str]:
    if CHAT_TEMPLATE in files.files:
        try:
            return {DEFAULT_TEMPLATE: files.files[CHAT_TEMPLATE].decode()}
        except UnicodeDecodeError as error:
            raise ConfigError(f"{CHAT_TEMPLATE} is not UTF-8: {error}") from error
    stated = config.get("chat_template")
    if stated is None:
        return {}
    if isinstance(stated, str):
        return {DEFAULT_TEMPLATE: stated}
    try:
        templates = {entry["name"]: entry["template"] for entry in stated}
    except (TypeError, KeyError):
        templates = {}
    if not templates or not all(isinstance(item, str) for pair in templates.items() for item in pair):
        raise ConfigError(f"chat_template in {TOKENIZER_CONFIG} must be a string or a list of name and template")
    return templates
