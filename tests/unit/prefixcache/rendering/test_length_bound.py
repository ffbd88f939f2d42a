"""No text becomes fewer tokens than the bound says, and where no bound is known none is given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from prefixcache.rendering.byte_tokenizer import byte_tokenizer_files
from prefixcache.rendering.length_bound import most_chars_per_token
from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON, TokenizerFiles
from tests.support.tiny_tokenizer import tiny_llama_files, tiny_tokenizer_files


def _tokenizer(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_buffer(files.files[TOKENIZER_JSON])


def _with_nfc() -> Tokenizer:
    tokenizer = _tokenizer(tiny_tokenizer_files())
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


BOUNDED = {
    "byte level": _tokenizer(tiny_tokenizer_files()),
    "byte level, NFC": _with_nfc(),
    "byte fallback": _tokenizer(tiny_llama_files("prepend")),
    "metaspace": _tokenizer(tiny_llama_files("first")),
    "bytes": _tokenizer(byte_tokenizer_files()),
}

TEXTS = st.lists(
    st.sampled_from(
        [*BOUNDED["byte level"].get_vocab(), "e\u0323\u0307", "\u1112\u1161\u11ab", "日本", " " * 40, "\x00"]
    ),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.one_of(TEXTS, st.text(max_size=200)))
def test_no_text_becomes_fewer_tokens(name: str, text: str) -> None:
    tokenizer = BOUNDED[name]
    most = most_chars_per_token(tokenizer)
    assert most is not None
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * most >= len(text)


def test_the_bound_is_the_longest_token() -> None:
    assert most_chars_per_token(BOUNDED["byte level"]) == len("<|endoftext|>")
    assert most_chars_per_token(BOUNDED["byte level, NFC"]) == 4 * len("<|endoftext|>")


def _edited(edit: Callable[[Tokenizer], None]) -> Tokenizer:
    tokenizer = _tokenizer(tiny_tokenizer_files())
    edit(tokenizer)
    return tokenizer


def _swallow_blanks(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])


def _lower(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def _shorten(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace("  ", " ")


def _drop_blanks(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])


@pytest.mark.parametrize("edit", [_swallow_blanks, _lower, _shorten, _drop_blanks])
def test_what_may_take_text_away_has_no_bound(edit: Callable[[Tokenizer], None]) -> None:
    assert most_chars_per_token(_edited(edit)) is None


def test_a_vocabulary_without_every_byte_has_no_bound() -> None:
    words = Tokenizer(models.WordLevel(vocab={"a": 0, "<unk>": 1}, unk_token="<unk>"))
    letters = Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    assert most_chars_per_token(words) is None
    assert most_chars_per_token(letters) is None
