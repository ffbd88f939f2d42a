"""Tokenizers of a few hundred ids, built in memory: every byte has one, so any text round-trips."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from prefixcache.rendering.byte_level import byte_characters
from prefixcache.rendering.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG, TOKENIZER_JSON, TokenizerFiles

TINY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_EOS_TOKEN = "<|im_end|>"
TINY_EOS_ID = 2

TINY_TEMPLATE = """\
{%- if tools %}
<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML: any role, text or text parts, tools printed first."""

_WORDS = " the and you of to in is it that with for a user assistant system tool hello Hello world answer question"

SpacePrefix = Literal["prepend", "first", "always", "never"]
"""Where a SentencePiece-like tokenizer adds a blank: before every text, the first one only (two ways), or nowhere."""


def tiny_tokenizer_files(
    *,
    chat_template: str | None = TINY_TEMPLATE,
    special_tokens: Sequence[str | AddedToken] = (),
    added_tokens: Sequence[str | AddedToken] = (),
    config: dict[str, Any] | None = None,
    dropout: float | None = None,
) -> TokenizerFiles:
    """A byte-level BPE tokenizer in the manner of GPT-2, with its chat template."""
    merges = _merges([*_WORDS.replace(" ", " Ġ").split(), *_WORDS.split()])
    vocabulary = _numbered(
        [*TINY_SPECIAL_TOKENS, *sorted(byte_characters()), *(left + right for left, right in merges)]
    )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, dropout=dropout))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, [*TINY_SPECIAL_TOKENS, *special_tokens], added_tokens)
    return files_of(tokenizer, chat_template=chat_template, config={"eos_token": TINY_EOS_TOKEN, **(config or {})})


def tiny_llama_files(
    space_prefix: SpacePrefix,
    *,
    chat_template: str | None = TINY_TEMPLATE,
    special_tokens: Sequence[str | AddedToken] = TINY_SPECIAL_TOKENS,
    added_tokens: Sequence[str | AddedToken] = (),
    strip: bool = True,
) -> TokenizerFiles:
    """A BPE tokenizer with byte fallback in the manner of Llama 2 (or, without `strip`, Gemma)."""
    chars = [chr(code) for code in range(33, 127)]
    merges = _merges([*_WORDS.replace(" ", " ▁").split(), "▁▁"])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *chars, "é", "日"]
    vocabulary = _numbered([*tokens, *(left + right for left, right in merges)])
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if space_prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=space_prefix, split=False)
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strip else chain)
    _add(tokenizer, ["<s>", "</s>", *special_tokens], added_tokens)
    return files_of(tokenizer, chat_template=chat_template, config={"bos_token": "<s>", "eos_token": "</s>"})


def files_of(
    tokenizer: Tokenizer, *, chat_template: str | None = TINY_TEMPLATE, config: dict[str, Any] | None = None
) -> TokenizerFiles:
    """The files a model folder would have for this tokenizer."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        **(config or {}),
    }
    files = {TOKENIZER_JSON: tokenizer.to_str().encode(), TOKENIZER_CONFIG: json.dumps(settings).encode()}
    if chat_template is not None:
        files[CHAT_TEMPLATE] = chat_template.encode()
    return TokenizerFiles(files=files)


def write_files(files: TokenizerFiles, folder: Path) -> Path:
    """Puts the files into a folder, which is returned."""
    for name, content in files.files.items():
        (folder / name).write_bytes(content)
    return folder


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(dict.fromkeys(tokens))}


def _merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Merges that build each word letter by letter."""
    steps = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    return list(dict.fromkeys(steps))


def _add(tokenizer: Tokenizer, special: Sequence[str | AddedToken], added: Sequence[str | AddedToken]) -> None:
    def token(given: str | AddedToken, *, special: bool) -> AddedToken:
        return given if isinstance(given, AddedToken) else AddedToken(given, special=special, normalized=False)

    tokenizer.add_special_tokens([token(given, special=True) for given in special])
    tokenizer.add_tokens([token(given, special=False) for given in added])
