"""Least squares over the latest observations, drawn towards a prior, with no term below zero.

    minimise   sum over observations of weight * (seen - sum of term * amount)^2  +  prior_weight * |terms - prior|^2

A direction that the amounts never took is decided by the prior alone, and a term that would come out negative is left
away: costs are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Observations:
    """What was seen of so much of each term. Weights fall by each observation; only sums are kept."""

    def __init__(self, num_terms: int, *, forgotten: float) -> None:
        """`forgotten`: observations after which one weighs 1/e."""
        self._kept = math.exp(-1 / forgotten)
        self.squares = [[0.0] * num_terms for _ in range(num_terms)]
        """Weighted sums of amount * amount."""
        self.seen = [0.0] * num_terms
        """Weighted sums of amount * what was seen."""

    def add(self, amounts: Sequence[float], seen: float, weight: float = 1.0) -> None:
        """So much of each term was seen to make this together."""
        kept = self._kept
        for place, amount in enumerate(amounts):
            row, weighted = self.squares[place], weight * amount
            for other, factor in enumerate(amounts):
                row[other] = row[other] * kept + weighted * factor
            self.seen[place] = self.seen[place] * kept + weighted * seen

    def scale(self, terms: Sequence[float]) -> float | None:
        """The factor that fits these terms best; None while nothing was observed of any that is not 0."""
        places = range(len(terms))
        squares = sum(terms[one] * self.squares[one][other] * terms[other] for one in places for other in places)
        return sum(term * seen for term, seen in zip(terms, self.seen, strict=True)) / squares if squares else None


def fitted(observations: Sequence[Observations], *, prior: Sequence[float], prior_weight: float) -> list[float]:
    """The terms, none of them negative. `prior_weight` is above 0; five terms take some 50 us."""
    terms = [0.0] * len(prior)
    used = list(range(len(prior)))
    while used:
        found = _solved(_equations(observations, used, prior, prior_weight))
        least = min(range(len(used)), key=found.__getitem__)
        if found[least] >= 0:
            for place, value in zip(used, found, strict=True):
                terms[place] = value
            break
        del used[least]
    return terms


def _equations(
    observations: Sequence[Observations], used: Sequence[int], prior: Sequence[float], prior_weight: float
) -> list[list[float]]:
    """One row a term that is used: its coefficients and, last, its right side."""
    return [
        [
            *(sum(each.squares[one][other] for each in observations) + prior_weight * (one == other) for other in used),
            sum(each.seen[one] for each in observations) + prior_weight * prior[one],
        ]
        for one in used
    ]


def _solved(rows: list[list[float]]) -> list[float]:
    """By Gauss, without pivots: the matrix is positive definite."""
    for place, row in enumerate(rows):
        for below in rows[place + 1 :]:
            factor = below[place] / row[place]
            for column in range(place, len(row)):
                below[column] -= factor * row[column]
    found = [0.0] * len(rows)
    for place in reversed(range(len(rows))):
        row = rows[place]
        rest = sum(row[later] * found[later] for later in range(place + 1, len(rows)))
        found[place] = (row[-1] - rest) / row[place]
    return found
