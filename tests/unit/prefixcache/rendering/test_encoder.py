from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.control_tokens import ControlTokens, UnmarkedText, unmark
from prefixcache.rendering.encoder import Encoder
from prefixcache.rendering.tokenizer_config import TokenizerConfig
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from prefixcache.rendering.vocabulary import Vocabulary
from tests.support.seeds import seeded
from tests.support.tiny_tokenizer import TINY_SPECIAL_TOKENS, files_of, tiny_llama_files, tiny_tokenizer_files

PARTS = (
    *(
        *TINY_SPECIAL_TOKENS,
        "<s>",
        "</s>",
        "<think>",
        "<|im_",
        "end|>",
        "<",
        "|>",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
    ),
    *(
        "the user",
        " the",
        "hello",
        "12",
        "é",
        "e\u0301",
        "日本",
        "🙂",
        "👨\u200d👩\u200d👧",
        "\ufeff",
        "\x00",
        "▁",
        "\u00a0",
    ),
)


def vocabulary_of(files: TokenizerFiles) -> Vocabulary:
    return Vocabulary.load(files, TokenizerConfig.from_files(files), ["<think>"])


def plain(text: str) -> UnmarkedText:
    return UnmarkedText(text=text, starts=(), joints=())


def rstrip_files() -> TokenizerFiles:
    tokens = [AddedToken(name, special=True, normalized=False, rstrip=name != "<|endoftext|>") for name in PARTS[:3]]
    return tiny_tokenizer_files(special_tokens=tokens)


TOKENIZERS: dict[str, Callable[[], TokenizerFiles]] = {
    "byte level": lambda: tiny_tokenizer_files(special_tokens=["<s>", "</s>"], added_tokens=["<think>"]),
    "some rstrip, as Phi-3": rstrip_files,
    "lstrip": lambda: tiny_tokenizer_files(
        special_tokens=[AddedToken("<s>", special=True, normalized=False, lstrip=True), "</s>"]
    ),
    "blank before every text": lambda: tiny_llama_files("prepend", added_tokens=["<think>"]),
    "metaspace first": lambda: tiny_llama_files("first", added_tokens=["<think>"]),
    "metaspace always": lambda: tiny_llama_files("always", added_tokens=["<think>"]),
    "metaspace never": lambda: tiny_llama_files("never", added_tokens=["<think>"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_add_up_to_the_whole(name: str) -> None:
    vocabulary = vocabulary_of(TOKENIZERS[name]())
    encoder = Encoder(vocabulary, cache_bytes=50_000)  # small, so that pieces come and go
    assert encoder.cache is not None
    source = seeded(f"pieces, {name}")
    for _ in range(300):
        text = "".join(source.choices(PARTS, k=source.randrange(40)))
        whole = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        pieces = encoder.cut(plain(text))
        assert encoder.encode(pieces).tolist() == whole
        assert encoder.encode(pieces).tolist() == whole
        assert encoder.cache.num_bytes <= 50_000


def test_what_is_remembered_is_not_counted_again() -> None:
    encoder = Encoder(vocabulary_of(tiny_tokenizer_files()))
    first = encoder.cut(plain("<|im_start|>user\nhello<|im_end|>"))
    more = encoder.cut(plain("<|im_start|>user\nhello<|im_end|>\nand more"))
    assert encoder.uncached_chars(first) == 32
    encoder.encode(first)
    assert encoder.uncached_chars(first) == 0
    assert encoder.uncached_chars(more) == len("\nand more")


@pytest.mark.parametrize(
    "files",
    [
        tiny_tokenizer_files(dropout=0.5),
        tiny_tokenizer_files(
            special_tokens=[AddedToken(name, special=True, rstrip=True) for name in TINY_SPECIAL_TOKENS]
        ),
    ],
    ids=["not deterministic", "no border"],
)
def test_no_pieces_where_they_do_not_add_up(files: TokenizerFiles, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    encoder = Encoder(vocabulary_of(files))
    assert encoder.cache is None
    assert "encoded whole" in caplog.text
    pieces = encoder.cut(plain("<|im_start|>user\nhello<|im_end|>"))
    assert [piece.context for piece in pieces] == ["start"]
    encoder.encode(pieces)
    assert encoder.uncached_chars(pieces) == 32


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_spelling_of_the_callers_is_text(name: str) -> None:
    vocabulary = vocabulary_of(TOKENIZERS[name]())
    encoder = Encoder(vocabulary)
    for spelling in vocabulary.control:
        prompt = unmark(f"<s>a {ControlTokens(vocabulary.control).mark(spelling)} b</s>")
        ids = encoder.encode(encoder.cut(prompt))
        control = [vocabulary.tokenizer.id_to_token(id) for id in ids if id in vocabulary.control_ids]
        assert control == [token for token in ("<s>", "</s>") if token in vocabulary.control]
        assert spelling in vocabulary.tokenizer.decode(ids.tolist(), skip_special_tokens=False).replace("▁", " ")


def test_text_that_only_normalization_turns_into_a_control_token_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={char: id for id, char in enumerate("<s>ab")}, merges=[]))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=True)])
    encoder = Encoder(vocabulary_of(files_of(tokenizer)))
    assert encoder.encode(encoder.cut(plain("a<s>b"))).tolist() == [3, 5, 4]
    with pytest.raises(InvalidRequest, match="control token"):
        encoder.encode(encoder.cut(plain("a＜s＞b")))  # noqa: RUF001  (full-width brackets are the attack)


def test_threads_share_one_encoder() -> None:
    vocabulary = vocabulary_of(tiny_tokenizer_files())
    encoder = Encoder(vocabulary, cache_bytes=20_000)
    source = seeded("threads")
    texts = ["".join(source.choices(PARTS, k=60)) for _ in range(40)]
    marked = [ControlTokens(vocabulary.control).mark(text) for text in texts]
    prompts = [encoder.cut(unmark(text)) for text in [*texts, *marked]]
    alone = Encoder(vocabulary)
    expected = [alone.encode(prompt) for prompt in prompts]
    wrong: list[int] = []

    def work(first: int) -> None:
        for step in range(60):
            number = (first + 7 * step) % len(prompts)
            if encoder.encode(prompts[number]) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
