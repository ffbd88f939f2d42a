from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.rendering.literals import literal_pattern

words = st.lists(st.text("ab<|.*", min_size=1, max_size=6), max_size=12)


@given(words, st.text("ab<|.*", max_size=60))
def test_finds_what_an_alternation_of_the_longest_first_finds(words: list[str], text: str) -> None:
    plain = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")
    expected = [match.span() for match in plain.finditer(text)]
    assert [match.span() for match in literal_pattern(words).finditer(text)] == expected


def test_shared_beginnings_are_tried_once() -> None:
    assert literal_pattern(["<s>", "</s>", "<sep>"]).pattern == "<(?:/s>|s(?:>|ep>))"


def test_no_words_match_nothing() -> None:
    assert literal_pattern([]).search("") is None


def test_long_runs_and_many_reserved_tokens() -> None:
    runs = [" " * size for size in range(1, 65)]
    reserved = [f"<|reserved_{number}|>" for number in range(1000)]
    pattern = literal_pattern([*runs, *reserved])
    match = pattern.match(" " * 100)
    assert match is not None
    assert match.end() == 64
    assert pattern.findall("a<|reserved_99|>b<|reserved_999|>") == ["<|reserved_99|>", "<|reserved_999|>"]
