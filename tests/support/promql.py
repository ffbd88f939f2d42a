"""What a PromQL expression names: metrics with their matchers, and labels it groups or joins by. Not a full parser.

sum by (model) (rate(a_total{code=~"5.."}[5m])) / on (model) b      selectors a_total{code=~"5.."}, b; label model
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<number>\d[\w.]*)|(?P<word>[A-Za-z_:][\w:]*)"""
    r"""|(?P<symbol>=~|!~|!=|==|<=|>=|[-+*/%^(){},=<>])|(?P<space>\s+)"""
)
_LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "offset", "bool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    label: str
    operator: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """`name{matchers}`; one that has only matchers names its metrics by `__name__`."""

    name: str
    matchers: tuple[Matcher, ...] = ()

    def __str__(self) -> str:
        inner = ", ".join(f'{each.label}{each.operator}"{each.value}"' for each in self.matchers)
        return f"{self.name}{{{inner}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """All that one expression names."""

    selectors: tuple[Selector, ...]
    labels: frozenset[str]
    """By which it groups or joins."""


def named(expression: str) -> Named:
    """Raises ValueError where a character belongs to no token."""
    tokens = [token for token in _tokens(expression) if token[0] != "space"]
    selectors: list[Selector] = []
    labels: set[str] = set()
    place = 0
    while place < len(tokens):
        kind, text = tokens[place]
        following = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        place += 1
        if kind == "word" and text in _LABEL_LISTS:
            end = next(at for at in range(place, len(tokens)) if tokens[at][1] == ")")
            labels.update(word for what, word in tokens[place:end] if what == "word")
            place = end + 1
        elif text == "{" or (kind == "word" and text not in _WORDS and following not in ("(", "by", "without")):
            matchers: tuple[Matcher, ...] = ()
            if text == "{" or following == "{":
                end = next(at for at in range(place, len(tokens)) if tokens[at][1] == "}")
                matchers = tuple(_matchers(tokens[place + (text != "{") : end]))
                place = end + 1
            selectors.append(Selector(name="" if text == "{" else text, matchers=matchers))
    return Named(selectors=tuple(selectors), labels=frozenset(labels))


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise ValueError(f"no PromQL at {expression[place:]!r}")
        yield str(match.lastgroup), match[0]
        place = match.end()


def _matchers(tokens: list[tuple[str, str]]) -> Iterator[Matcher]:
    for place in range(0, len(tokens), 4):
        (_, label), (_, operator), (_, value) = tokens[place : place + 3]
        yield Matcher(label=label, operator=operator, value=value[1:-1].replace(r"\"", '"'))
