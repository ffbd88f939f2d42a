"""The fewest tokens a text can become, told from its length alone: what is far too long is refused unread.

Where every byte has a token and nothing takes text away, a token stands for at most as many characters as the longest
entry of the vocabulary has:

    unknown text      has no token, or shares one, unless all 256 bytes are in the vocabulary
    normalizers       NFC composes a few characters into one; a Replace that does not shorten and a Prepend are harmless
    pre-tokenizers    may drop text (Whitespace does), so only those known to keep it all
    added tokens      that swallow blanks have no longest text
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from prefixcache.rendering.byte_level import byte_characters

_MOST_COMPOSED = 4
"""Characters that canonical composition joins into one at most: three in Unicode 16, and one to spare."""

_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace"}
_KEEPS_ALL_UNLESS_REMOVING = {"Split", "Punctuation"}


def most_chars_per_token(tokenizer: Tokenizer) -> int | None:
    """None where no bound is known."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    factor = _shrinking(content["normalizer"])
    if (
        factor is None
        or content["model"]["type"] != "BPE"
        or not _has_every_byte(content, vocabulary)
        or not all(_keeps_all(step) for step in _steps(content["pre_tokenizer"], "pretokenizers"))
        or any(token["lstrip"] or token["rstrip"] for token in content["added_tokens"])
    ):
        return None
    return factor * max(map(len, vocabulary))


def _has_every_byte(content: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    if any(step["type"] == "ByteLevel" for step in _steps(content["pre_tokenizer"], "pretokenizers")):
        return byte_characters().keys() <= vocabulary.keys()
    return bool(content["model"]["byte_fallback"]) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _keeps_all(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPS_ALL or (
        step["type"] in _KEEPS_ALL_UNLESS_REMOVING and step["behavior"].lower() != "removed"
    )


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """By how much a text can become shorter; None if that is not known."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] == "NFC":
            factor *= _MOST_COMPOSED
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The elements of a sequence, or the one that stands alone."""
    if part is None:
        return []
    elements: list[dict[str, Any]] = part[name] if part["type"] == "Sequence" else [part]
    return elements
