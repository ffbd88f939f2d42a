"""The tokens that a tokenizer's post-processor puts around every text: BOS, EOS, [CLS] ... [SEP]."""

from __future__ import annotations

from array import array

from tokenizers import Tokenizer

_PROBE = "x"


def special_affixes(tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    """Ids before and after a text that is encoded with special tokens; they are the same for every single text."""
    encoding = tokenizer.encode(_PROBE)
    is_added = list(encoding.special_tokens_mask)
    first = next((place for place, added in enumerate(is_added) if not added), len(is_added))
    after_last = next((len(is_added) - place for place, added in enumerate(reversed(is_added)) if not added), first)
    return array("I", encoding.ids[:first]), array("I", encoding.ids[after_last:])
