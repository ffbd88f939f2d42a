"""Every detokenizer against the tokenizer's own batch decode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from prefixcache.rendering.detokenizer import Detokenizer
from prefixcache.rendering.detokenizers import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    StreamDetokenizer,
    detokenizer_factory,
)
from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON, TokenizerFiles
from tests.support.cuts import cut
from tests.support.tiny_tokenizer import tiny_llama_files, tiny_tokenizer_files

ADDED = (
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("日 本", special=False, normalized=False),
    AddedToken("Ġodd", special=False, normalized=False),
    AddedToken("<0xE6>x", special=False, normalized=False),
    AddedToken("▁under", special=False, normalized=False),
)


def tokenizer_of(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_buffer(files.files[TOKENIZER_JSON])


def words(decoder: decoders.Decoder | None, *tokens: str) -> Tokenizer:
    vocabulary = {token: id for id, token in enumerate(["<unk>", "<s>", "</s>", *tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


BYTE_LEVEL = tokenizer_of(tiny_tokenizer_files(added_tokens=ADDED))
LLAMA = tokenizer_of(tiny_llama_files("prepend", added_tokens=ADDED))
GEMMA = tokenizer_of(tiny_llama_files("never", added_tokens=ADDED, strip=False))
TOKENIZERS: dict[str, tuple[Tokenizer, type]] = {
    "byte level": (BYTE_LEVEL, ByteLevelDetokenizer),
    "byte fallback, one blank stripped": (LLAMA, ByteFallbackDetokenizer),
    "byte fallback": (GEMMA, ByteFallbackDetokenizer),
    "metaspace": (words(decoders.Metaspace(), "▁", "▁Hello", "a", "▁▁", "日", "x▁y"), StreamDetokenizer),
    "wordpiece": (words(decoders.WordPiece(), "hello", "##ing", ".", ",", "'s", "n't", "日"), StreamDetokenizer),
    "suffixes": (words(decoders.BPEDecoder(), "hel", "lo</w>", "a", "b</w>", "."), StreamDetokenizer),
    "no decoder": (words(None, "hel", "lo", "日", "."), StreamDetokenizer),
}
BYTE_IDS = {
    "byte level": [id for token, id in BYTE_LEVEL.get_vocab().items() if len(token) == 1],
    "byte fallback, one blank stripped": [LLAMA.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "日é🙂".encode()],
    "byte fallback": [GEMMA.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "日é🙂".encode()],
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_cuts_equal_the_batch_decode(name: str, data: st.DataObject) -> None:
    tokenizer, kind = TOKENIZERS[name]
    top = tokenizer.get_vocab_size() + 3  # a few ids that no token has
    id = st.integers(0, top) | st.integers(0, 4) | st.sampled_from(BYTE_IDS.get(name, [0]))
    ids = data.draw(st.lists(id, max_size=50), label="ids")
    detokenizer = detokenizer_factory(tokenizer)()
    assert isinstance(detokenizer, kind)
    text = "".join(detokenizer.feed(part) for part in cut(ids, data)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_single_id(name: str) -> None:
    tokenizer, _ = TOKENIZERS[name]
    new = detokenizer_factory(tokenizer)
    for id in range(tokenizer.get_vocab_size() + 2):
        detokenizer = new()
        assert detokenizer.feed([id]) + detokenizer.flush() == tokenizer.decode([id], skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA, GEMMA])
def test_text_is_emitted_as_soon_as_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂 the and", add_special_tokens=False).ids
    detokenizer = detokenizer_factory(tokenizer)()
    emitted = [detokenizer.feed([id]) for id in ids]
    assert "".join(emitted) == "🙂 the and"
    assert emitted[-1] == " and"
    assert detokenizer.flush() == ""


def test_streams_share_nothing() -> None:
    new: Callable[[], Detokenizer] = detokenizer_factory(BYTE_LEVEL)
    first, second = new(), new()
    smile = BYTE_LEVEL.encode("🙂").ids
    assert first.feed(smile[:2]) == ""
    assert second.feed(smile) == "🙂"
    assert first.feed(smile[2:]) == "🙂"


def test_broken_bytes_cost_linear_time_and_are_not_lost() -> None:
    broken = BYTE_LEVEL.token_to_id("ð")
    assert broken is not None
    detokenizer = detokenizer_factory(BYTE_LEVEL)()
    text = "".join(detokenizer.feed([broken]) for _ in range(2000)) + detokenizer.flush()
    assert text == BYTE_LEVEL.decode([broken] * 2000)


def test_a_stream_that_says_nothing_or_raises_leaves_all_to_the_flush() -> None:
    """DecodeStream fails on a byte-fallback vocabulary: what it did not say is made up for at the end."""
    byte = LLAMA.token_to_id("<0xE6>")
    assert byte is not None
    silent = StreamDetokenizer(LLAMA)
    ids = [byte] * (2 * StreamDetokenizer.HELD_IDS)
    assert silent.feed(ids) + silent.flush() == LLAMA.decode(ids)
