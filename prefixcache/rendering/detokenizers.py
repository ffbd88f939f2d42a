"""Detokenizers for the decoders that tokenizers really use.

    ByteLevel                                    GPT-2, Llama 3, Qwen, SmolLM, DeepSeek       ByteLevelDetokenizer
    Replace, ByteFallback, Fuse [, Strip]        Llama 2, Mistral, Gemma, Phi-3               ByteFallbackDetokenizer
    anything else                                WordPiece, Metaspace, BPE suffixes           StreamDetokenizer

The first two exist because tokenizers' own DecodeStream never emits a tail that is not valid UTF-8, takes quadratic
time over invalid bytes, and raises on many id sequences of a byte-fallback vocabulary.
"""

from __future__ import annotations

import builtins
import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from prefixcache.rendering.byte_level import byte_characters
from prefixcache.rendering.detokenizer import Detokenizer

REPLACEMENT = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DetokenizerFactory:
    """Makes a detokenizer for each stream, and tells what each token adds to a text."""

    new: Callable[[], Detokenizer]
    token_bytes: Callable[[int], bytes | None]
    """Id -> bytes, be they half a character; None for ids that add nothing (special and unknown ones).

    Exact for the first two kinds of decoder. With others a token's text depends on its neighbours, and this is the text
    that it has alone.
    """

    def __call__(self) -> Detokenizer:
        return self.new()


def detokenizer_factory(tokenizer: Tokenizer) -> DetokenizerFactory:
    """Tables are built once, here."""
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    chain: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    kinds = [link.get("type") for link in chain]
    if kinds == ["ByteLevel"]:
        table = _byte_level_table(tokenizer)
        return DetokenizerFactory(lambda: ByteLevelDetokenizer(table), table.get)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        pattern = chain[0]["pattern"].get("String")
        strip: dict[str, Any] = chain[3] if len(chain) == 4 else {"content": " ", "start": 0, "stop": 0}
        if pattern and not strip["stop"]:
            tables = _byte_fallback_tables(tokenizer, pattern, chain[0]["content"])
            return DetokenizerFactory(
                lambda: ByteFallbackDetokenizer(tables, strip["content"], strip["start"]), tables.bytes_of
            )
    return DetokenizerFactory(lambda: StreamDetokenizer(tokenizer), lambda id: _text_alone(tokenizer, id))


def _text_alone(tokenizer: Tokenizer, id: int) -> bytes | None:
    text: str = tokenizer.decode([id], skip_special_tokens=True)
    return text.encode() or None


def _token_texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Every id that leaves a text behind, and its token."""
    added = tokenizer.get_added_tokens_decoder()
    # By content and not by id, as batch decoding goes: an id of the model with a special token's name is skipped too.
    special = {token.content for token in added.values() if token.special}
    texts = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=True).items()}
    texts |= {id: token.content for id, token in added.items()}
    return {id: token for id, token in texts.items() if token not in special}


# --- byte level -------------------------------------------------------------------------------------------


def _byte_level_table(tokenizer: Tokenizer) -> dict[int, bytes]:
    byte_of = byte_characters()
    table: dict[int, bytes] = {}
    for id, token in _token_texts(tokenizer).items():
        try:
            table[id] = bytes([byte_of[char] for char in token])
        except KeyError:  # an added token with a character that stands for no byte is text as it is
            table[id] = token.encode()
    return table


class ByteLevelDetokenizer:
    """Joins the bytes of the tokens and decodes what is whole."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        return self._decoder.decode(b"".join([table.get(id, b"") for id in ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


# --- byte fallback ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteFallbackTables:
    """Each id is one byte, a text, or neither."""

    bytes: Mapping[int, int]
    texts: Mapping[int, str]

    def bytes_of(self, id: int) -> builtins.bytes | None:
        byte = self.bytes.get(id)
        if byte is not None:
            return byte.to_bytes()
        text = self.texts.get(id)
        return text.encode() if text is not None else None


def _byte_fallback_tables(tokenizer: Tokenizer, pattern: str, content: str) -> ByteFallbackTables:
    texts = {id: token.replace(pattern, content) for id, token in _token_texts(tokenizer).items()}
    matches = {id: _BYTE_TOKEN.fullmatch(text) for id, text in texts.items()}
    return ByteFallbackTables(
        bytes={id: int(match[1], 16) for id, match in matches.items() if match},
        texts={id: text for id, text in texts.items() if not matches[id]},
    )


class ByteFallbackDetokenizer:
    """Holds a run of byte tokens until something else ends it: one bad byte spoils the characters of the whole run.

    <0xE6> <0x97> <0xA5> a      日a
    <0xE6> <0x97> a             ��a     one replacement character a byte
    """

    __slots__ = ("_run", "_strip_char", "_strips_left", "_tables")

    def __init__(self, tables: ByteFallbackTables, strip_char: str, strip_chars: int) -> None:
        self._tables = tables
        self._run = bytearray()
        self._strip_char = strip_char
        self._strips_left = strip_chars

    def feed(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for id in ids:
            byte = self._tables.bytes.get(id)
            if byte is not None:
                self._run.append(byte)
                continue
            text = self._tables.texts.get(id)
            if text is None:  # special and unknown ids are dropped before decoding, so they end no run
                continue
            parts += (self._end_run(), text)
        return self._stripped("".join(parts))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        while self._strips_left and text:
            if text[0] != self._strip_char:
                self._strips_left = 0
            else:
                self._strips_left -= 1
                text = text[1:]
        return text


# --- anything else ----------------------------------------------------------------------------------------


class StreamDetokenizer:
    """tokenizers' DecodeStream, and the batch decode at the end for what it held back.

    Once the stream raises, or has said nothing for HELD_IDS ids and so begins to cost quadratic time, everything
    more comes with the flush.
    """

    HELD_IDS = 64

    __slots__ = ("_emitted", "_ids", "_num_silent", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._emitted: list[str] = []
        self._num_silent = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._ids += ids
        first = len(self._emitted)
        for id in ids:
            text = self._step(id)
            if text:
                self._emitted.append(text)
        return "".join(self._emitted[first:])

    def _step(self, id: int) -> str | None:
        if self._stream is None:
            return None
        try:
            text = self._stream.step(self._tokenizer, id)
        except Exception:  # the library raises bare Exception for ids whose text changes what was emitted
            self._stream = None
            return None
        self._num_silent = 0 if text else self._num_silent + 1
        if self._num_silent >= self.HELD_IDS:
            self._stream = None
        return text

    def flush(self) -> str:
        """What the batch decode has after the text emitted; nothing if that text turned out otherwise."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        emitted = "".join(self._emitted)
        return whole[len(emitted) :] if whole.startswith(emitted) else ""
