"""A tokenizer of bytes with a chat template, built in: simulated workers serve it, so nothing is downloaded.

    id    0 ......... 255 | 256            257           258
          the byte itself | <|endoftext|>  <|im_start|>  <|im_end|>

Every text has exactly one encoding, its UTF-8, and every text comes back as it was. A prompt has about four times as
many tokens as with a vocabulary of words.
"""

from __future__ import annotations

import json
from functools import cache

from prefixcache.rendering.byte_level import byte_characters
from prefixcache.rendering.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG, TOKENIZER_JSON, TokenizerFiles

_NUM_BYTES = 256
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

BYTE_VOCAB_SIZE = _NUM_BYTES + len(_SPECIAL_TOKENS)
BYTE_STOP_ID = _NUM_BYTES + _SPECIAL_TOKENS.index("<|im_end|>")
"""The end of an answer."""

_TEMPLATE = """\
{%- macro text(content) %}
{%- if content is string %}{{ content }}
{%- else %}{% for part in content or [] %}{{ part.text }}{% endfor %}
{%- endif %}
{%- endmacro %}
{%- if tools %}
<|im_start|>system
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
<|im_end|>
{% endif %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ text(message.content) }}
{%- for call in message.tool_calls or [] %}

<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML: any role, text or text parts, tools printed first, tool calls printed after the text."""


@cache
def byte_tokenizer_files() -> TokenizerFiles:
    """The files that a model folder with this tokenizer would have; always the same bytes."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    return TokenizerFiles(
        files={
            TOKENIZER_JSON: json.dumps(_tokenizer()).encode(),
            TOKENIZER_CONFIG: json.dumps(settings).encode(),
            CHAT_TEMPLATE: _TEMPLATE.encode(),
        }
    )


def _tokenizer() -> dict[str, object]:
    """tokenizer.json: a byte-level BPE that merges nothing."""
    # Without its regex the byte level leaves a text whole: nothing is merged anyway, and it takes a third of the time.
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": _NUM_BYTES + place, "content": content, **flags, "special": True}
            for place, content in enumerate(_SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_characters(), "merges": []},
    }
