from __future__ import annotations

from array import array

import pytest
from tokenizers import Tokenizer, models

from prefixcache.rendering.mid_text import MidTextEncoder, encode_batch, spelling_ids
from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON
from tests.support.tiny_tokenizer import SpacePrefix, tiny_llama_files, tiny_tokenizer_files


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    [ids] = MidTextEncoder(tokenizer).encode([text])
    return [tokenizer.id_to_token(id) for id in ids]


@pytest.mark.parametrize("space_prefix", ["prepend", "first", "always", "never"])
def test_no_blank_is_put_before_the_text(space_prefix: SpacePrefix) -> None:
    tokenizer = Tokenizer.from_buffer(tiny_llama_files(space_prefix).files[TOKENIZER_JSON])
    assert tokens_of(tokenizer, "xy z") == ["x", "y", "▁", "z"]
    assert tokens_of(tokenizer, "") == []


@pytest.mark.parametrize("text", ["x", "\n", "\n\nx", " x", "  the", "\r\n", "é"])
def test_a_tokenizer_that_adds_nothing_is_left_alone(text: str) -> None:
    tokenizer = Tokenizer.from_buffer(tiny_tokenizer_files().files[TOKENIZER_JSON])
    assert MidTextEncoder(tokenizer).encode([text]) == encode_batch(tokenizer, [text])


def test_a_spelling_the_model_itself_knows_is_said_in_parts() -> None:
    """Without pre-tokenization a word-level model takes the whole spelling for its control token."""
    vocabulary = {"<unk>": 0, "<s>": 1, "<": 2, "s": 3, ">": 4, "s>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", ">"])
    ids = spelling_ids(tokenizer, MidTextEncoder(tokenizer), ["<s>", ">"], [1, 4])
    assert ids == {"<s>": array("I", [2, 5]), ">": array("I")}
    assert not tokenizer.encode_special_tokens
