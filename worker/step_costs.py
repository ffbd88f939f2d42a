"""What chunks and decodes cost in time, learnt from the engine's own steps.

    a step    token * tokens of chunks  +  pair * their query-key pairs
            + fixed, if there are decodes  +  decode * decodes  +  key * tokens of their contexts

    pairs of a chunk  | start, cached | num_tokens |      num_tokens * (start + num_tokens / 2): each row attends to
                                                          all before it

All five are fitted together, for under load no step has chunks or decodes alone. What they cost beside each other is
learnt from many steps, and how fast that is from the latest: a load beside this process changes the one and not the
other, and a long prompt's chunks are shallow first and then all deep, so that few in a row cannot tell tokens from
pairs. Before any step did, the shape of the model says it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prefixcache.limits import DEFAULT_PREFILL_RATE
from worker.least_squares import Observations, fitted

PAIRS_A_UNIT = 2_000
"""Pairs are counted in so many, which cost about what a row does in a small model: alike in size, alike in weight."""
FIXED_ROWS = 32
"""So is what decodes take whatever their number, to read all weights: by measurement, of the order of so many rows."""
DECODE_ROWS = 4.0
"""Of one decode beside that, before it was learnt; by measurement, too."""
FORGOTTEN_STEPS = 32
"""Weight of a step among those before it is 1 / this: long enough to even out noise, short enough to follow load."""
FORGOTTEN_SHAPE_STEPS = 1_024
"""Likewise for what the terms cost beside each other: several long prompts."""
PRIOR_ROWS = 64
"""The prior weighs like a chunk of so many rows."""
MOST_SURPRISING = 4.0
"""A step counts as so many times what was expected at most: a machine that stood still says nothing of its speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one step computes."""

    chunk_tokens: int
    """Of prefill chunks; a share of one token is a decode, whatever draws it."""
    chunk_pairs: float
    num_decodes: int
    context_tokens: int
    """Of all decodes."""


def pairs(start: int, num_tokens: int) -> float:
    """Query-key pairs of a chunk behind `start` tokens."""
    return num_tokens * (start + num_tokens / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """Seconds that prefill chunks add to a step."""

    token_s: float
    pair_s: float

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        return self.token_s * num_tokens + self.pair_s * num_pairs

    def num_tokens(self, start: int, seconds: float) -> float:
        """The longest chunk behind `start` tokens that takes no longer."""
        # The larger root of token_s * T + pair_s * (T * start + T * T / 2) = seconds, which holds for pair_s 0, too.
        linear = self.token_s + self.pair_s * start
        below = linear + math.sqrt(linear * linear + 2 * self.pair_s * seconds)
        return 2 * seconds / below if below else math.inf


class StepCosts:
    """Belongs to the step thread."""

    def __init__(self, *, pair_rows: float) -> None:
        """`pair_rows`: what a pair costs beside a row, by the model's shape; RunnerLimits has it."""
        unit_rows = pair_rows * PAIRS_A_UNIT
        self._prior = (1.0, unit_rows, 1.0, DECODE_ROWS, unit_rows)
        """In rows of a chunk."""
        self._with_chunks = Observations(len(self._prior), forgotten=FORGOTTEN_SHAPE_STEPS)
        self._decodes_alone = Observations(len(self._prior), forgotten=FORGOTTEN_SHAPE_STEPS)
        self._latest = Observations(len(self._prior), forgotten=FORGOTTEN_STEPS)
        """Of those with chunks."""
        self._factor = 1.0
        """What steps take at the speed of the latest ones, by what they take at the speed of the first."""
        self._terms: Sequence[float] | None = None
        """None where they are to be fitted anew."""
        self._is_told = False

    @property
    def chunk_cost(self) -> ChunkCost:
        """Of the latest steps; before the first, that of the usual speed and the model's shape."""
        token_s, unit_s = self._fitted_terms()[:2]
        return ChunkCost(token_s=token_s, pair_s=unit_s / PAIRS_A_UNIT)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step has ended that did not fail as a whole."""
        if not work.chunk_tokens and not work.num_decodes:
            return
        expected_s = self._seconds(_amounts(work)) if self._is_told else 0.0
        if expected_s:
            seconds = min(seconds, MOST_SURPRISING * expected_s)
        # At one speed, lest a change of it looks like a term. Noise grows with the root of what is measured: by this
        # weight each second counts alike.
        steady_s = seconds / self._factor
        weight = 1 / max(steady_s, 1e-6)
        if work.chunk_tokens:
            self._with_chunks.add(_amounts(work), steady_s, weight)
            self._latest.add(_amounts(work), seconds, weight)
            # Between chunks nobody asks: steps of decodes alone are spared the fit.
            self._terms, self._is_told = None, True
        else:
            self._decodes_alone.add(_amounts(work), steady_s, weight)

    def split(self, work: StepWork, seconds: float) -> tuple[float, float]:
        """Which part of a step its chunks took, and which its decodes."""
        tokens, units, *decodes = _amounts(work)
        if not tokens:
            return 0.0, seconds
        chunks_s, decodes_s = self._seconds((tokens, units, 0.0, 0.0, 0.0)), self._seconds((0.0, 0.0, *decodes))
        share = chunks_s / (chunks_s + decodes_s) if chunks_s else 1.0
        return seconds * share, seconds * (1 - share)

    def _seconds(self, amounts: Sequence[float]) -> float:
        return sum(term * amount for term, amount in zip(self._fitted_terms(), amounts, strict=True))

    def _fitted_terms(self) -> Sequence[float]:
        if self._terms is None:
            row_s = self._with_chunks.scale(self._prior)
            row_s = 1 / DEFAULT_PREFILL_RATE if row_s is None else row_s
            prior = [row_s * rows for rows in self._prior]
            if row_s:
                # Of a chunk of PRIOR_ROWS: the square of its amount, by the weight of a step of that time.
                weight = PRIOR_ROWS / row_s
                terms = fitted((self._with_chunks, self._decodes_alone), prior=prior, prior_weight=weight)
                self._factor = self._latest.scale(terms) or 1.0
                self._terms = [self._factor * term for term in terms]
            else:
                self._terms = prior
        return self._terms


def _amounts(work: StepWork) -> tuple[float, float, float, float, float]:
    return (
        work.chunk_tokens,
        work.chunk_pairs / PAIRS_A_UNIT,
        FIXED_ROWS if work.num_decodes else 0.0,
        work.num_decodes,
        work.context_tokens / PAIRS_A_UNIT,
    )
