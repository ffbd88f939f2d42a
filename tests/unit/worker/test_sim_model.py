"""The simulated model's text: plain words, an end, and another text for another context."""

from __future__ import annotations

from array import array

import pytest

from prefixcache.rendering.byte_tokenizer import BYTE_STOP_ID
from prefixcache.types import pack_tokens
from worker import sim_model
from worker.sim_model import ANSWER_TOKENS, FLOOR_LOGIT, next_logits

WORDS = frozenset(sim_model._WORDS)


def greedy(prompt: bytes, num_tokens: int = 2 * ANSWER_TOKENS) -> list[int]:
    """The answer to a prompt, its stop id included."""
    tokens = array("I", [*prompt])
    while len(tokens) - len(prompt) < num_tokens:
        logits = next_logits(tokens.tobytes(), tokens[len(prompt) :])
        tokens.append(max(logits, key=logits.__getitem__))
        if tokens[-1] == BYTE_STOP_ID:
            break
    return list(tokens[len(prompt) :])


ANSWERS = {number: greedy(b"question %d" % number) for number in range(60)}


def test_answers_are_sentences_of_words() -> None:
    for answer in ANSWERS.values():
        text = bytes(answer[:-1]).decode("ascii")
        assert text.endswith(".")
        assert set(text.replace(",", "").replace(".", "").split()) <= WORDS


def test_every_answer_ends_and_lengths_differ() -> None:
    lengths = [len(answer) for answer in ANSWERS.values()]
    assert all(answer[-1] == BYTE_STOP_ID for answer in ANSWERS.values())
    assert max(lengths) < ANSWER_TOKENS + 16
    assert len(set(lengths)) > 20
    assert 40 < sum(lengths) / len(lengths) < 200


def test_the_longest_answers_end_at_the_next_word() -> None:
    logits = next_logits(b"", b"x" * (ANSWER_TOKENS - 7) + b" a word")
    assert max(logits, key=logits.__getitem__) == ord(".")
    logits = next_logits(b"", b"x" * (ANSWER_TOKENS - 8) + b" a word.")
    assert max(logits, key=logits.__getitem__) == BYTE_STOP_ID


@pytest.mark.parametrize("changed", [0, 17, 39])
def test_one_other_token_anywhere_changes_all_logits(changed: int) -> None:
    context = [*range(40)]
    other = [token + (place == changed) for place, token in enumerate(context)]
    one, two = (next_logits(pack_tokens(tokens), []) for tokens in (context, other))
    assert one.keys() == two.keys()
    assert all(one[token] != two[token] for token in one)


@pytest.mark.parametrize(
    ("output", "may_follow"),
    [
        (b"", {word[0] for word in WORDS}),
        (b"a hill ri", {"v", "g"}),
        (b"river", {" ", ",", "."}),
        (b"the", {"n", "r", "s", "i", "y", " ", ",", "."}),
        (b"river,", {" "}),
        (b"so. ", {word[0] for word in WORDS}),
        (b"zzz", {" ", ",", "."}),
        (b"zz\xff", {word[0] for word in WORDS}),
    ],
)
def test_what_may_follow(output: bytes, may_follow: set[str]) -> None:
    logits = next_logits(b"", output)
    assert {chr(token) for token in logits} == may_follow
    assert list(logits) == sorted(logits)
    assert min(logits.values()) > FLOOR_LOGIT + 40


def test_after_a_full_stop_the_answer_may_end() -> None:
    assert set(next_logits(b"", b"river.")) == {ord(" "), BYTE_STOP_ID}


def test_a_token_without_a_character_does_not_disturb() -> None:
    assert set(next_logits(b"", [BYTE_STOP_ID])) == set(next_logits(b"", []))
