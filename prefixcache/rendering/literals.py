"""Regular expressions for a set of literal strings, longest first."""

from __future__ import annotations

import re
from collections.abc import Iterable


class _Node:
    """One letter further into the words of a trie."""

    __slots__ = ("children", "is_word")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.is_word = False


def literal_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `words` at a place, as a tokenizer's added tokens do; never matches for no words.

    Built as a trie: a plain alternation tries a thousand reserved tokens one by one at every "<" of a text.

        <s>, <sep>, </s>        <(?:/s>|s(?:>|ep>))
    """
    root = _Node()
    for word in words:
        assert word, "an empty word would match everywhere"
        node = root
        for char in word:
            node = node.children.setdefault(char, _Node())
        node.is_word = True
    return re.compile(_pattern(root) if root.children else "(?!)")


def _pattern(node: _Node) -> str:
    literal = ""
    while len(node.children) == 1 and not node.is_word:
        [(char, node)] = node.children.items()
        literal += re.escape(char)
    if not node.children:
        return literal
    branches = "|".join(re.escape(char) + _pattern(child) for char, child in sorted(node.children.items()))
    return f"{literal}(?:{branches})" + ("?" if node.is_word else "")
