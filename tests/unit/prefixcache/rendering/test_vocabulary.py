from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, models

from prefixcache.rendering.tokenizer_config import TokenizerConfig
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from prefixcache.rendering.vocabulary import Vocabulary
from tests.support.tiny_tokenizer import (
    TINY_EOS_ID,
    TINY_SPECIAL_TOKENS,
    files_of,
    tiny_llama_files,
    tiny_tokenizer_files,
)


def vocabulary_of(files: TokenizerFiles, *literals: str) -> Vocabulary:
    return Vocabulary.load(files, TokenizerConfig.from_files(files), literals)


def test_control_tokens_are_the_special_ones_and_those_the_template_writes() -> None:
    files = tiny_tokenizer_files(added_tokens=["<think>", "<tool_call>", "\n\n\n"])
    vocabulary = vocabulary_of(files, "a <think>\n\n\n", "<tool_", "call>")
    assert vocabulary.added == {*TINY_SPECIAL_TOKENS, "<think>", "<tool_call>", "\n\n\n"}
    assert vocabulary.control == {*TINY_SPECIAL_TOKENS, "<think>"}
    assert {0, 1, TINY_EOS_ID} < vocabulary.control_ids
    assert not vocabulary.has_normalized_control


def test_hard_borders_look_at_nothing_beside_them() -> None:
    odd = [
        AddedToken("<rstrip>", special=True, normalized=False, rstrip=True),
        AddedToken("<word>", special=True, normalized=False, single_word=True),
        AddedToken("<normalized>", special=True, normalized=True),
        AddedToken("<lstrip>", special=True, normalized=False, lstrip=True),
    ]
    vocabulary = vocabulary_of(tiny_tokenizer_files(special_tokens=odd, added_tokens=["<plain>"]), "<plain>")
    assert vocabulary.hard_borders == {*TINY_SPECIAL_TOKENS, "<lstrip>"}


def test_normalized_control_tokens_matter_only_with_a_normalizer() -> None:
    token = AddedToken("<n>", special=True, normalized=True)
    assert not vocabulary_of(tiny_tokenizer_files(special_tokens=[token])).has_normalized_control
    assert vocabulary_of(tiny_llama_files("prepend", special_tokens=[token])).has_normalized_control


def test_the_size_covers_the_highest_id() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 99}, unk_token="a"))
    assert vocabulary_of(files_of(tokenizer)).vocab_size == 100


def test_a_special_token_missing_from_the_tokenizer_file_is_special_all_the_same() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<": 1, "e": 2, ">": 3, "<e>": 4}, merges=[]))
    files = files_of(tokenizer, config={"eos_token": "<e>", "pad_token": "<not in the vocabulary>"})
    vocabulary = vocabulary_of(files)
    assert vocabulary.control == {"<e>"}
    assert vocabulary.control_ids == {4}
    assert vocabulary.vocab_size == 5
