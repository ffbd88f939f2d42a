"""Ids of text that stands in the middle of other text.

SentencePiece-like tokenizers put a blank before every text they are given. A newline before a text from the middle
takes that blank upon itself and is cut off again, as in transformers' `encode_marked_chat`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[array[int]]:
    """Ids of each text, nothing added. Unlike `encode` it releases the interpreter lock and skips the offsets."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False) if texts else []
    return [array("I", encoding.ids) for encoding in encodings]


class MidTextEncoder:
    """Encodes texts as if other text stood before them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        alone, anchored, anchor = encode_batch(tokenizer, ["x", "\nx", "\n"])
        rest = anchored[len(anchor) :]
        self._adds_blank = bool(rest) and anchored[: len(anchor)] == anchor and rest != alone
        self._anchor_ids = anchor

    def encode(self, texts: Sequence[str]) -> list[array[int]]:
        """Ids of each text. Where the newline grows into a token of the text, that text is encoded as it is."""
        if not self._adds_blank:
            return encode_batch(self._tokenizer, texts)
        size = len(self._anchor_ids)
        anchored = encode_batch(self._tokenizer, ["\n" + text for text in texts])
        return [
            ids[size:] if ids[:size] == self._anchor_ids else encode_batch(self._tokenizer, [text])[0]
            for text, ids in zip(texts, anchored, strict=True)
        ]


def spelling_ids(
    tokenizer: Tokenizer, mid_text: MidTextEncoder, spellings: Collection[str], control_ids: Collection[int]
) -> dict[str, array[int]]:
    """Ids of each control spelling as plain text. Only for a tokenizer that no other thread knows yet."""
    tokenizer.encode_special_tokens = True
    try:
        texts = sorted(spellings)
        batch = mid_text.encode(texts)
        return {
            text: _without_control(mid_text, text, ids, frozenset(control_ids))
            for text, ids in zip(texts, batch, strict=True)
        }
    finally:
        tokenizer.encode_special_tokens = False


def _without_control(mid_text: MidTextEncoder, text: str, ids: array[int], control_ids: frozenset[int]) -> array[int]:
    """Ids of a spelling; where even as text it becomes a control token, it is encoded in halves.

    A single character that is nothing but a control token in this vocabulary cannot be said and has no ids.
    """
    if control_ids.isdisjoint(ids):
        return ids
    if len(text) == 1:
        return array("I")
    halves = (text[: len(text) // 2], text[len(text) // 2 :])
    whole = array("I")
    for half, half_ids in zip(halves, mid_text.encode(halves), strict=True):
        whole += _without_control(mid_text, half, half_ids, control_ids)
    return whole
