"""Draws the next token of each sequence from its logits.

The draw for output token n depends on (seed, choice, n) alone, not on what was drawn before or on the neighbours in the
batch: another worker can go on with the same sequence, and a repeated request gives the same text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from prefixcache.errors import WorkerFault
from worker.runner import SampleSpec

_SORTED_AT_ONCE = 256
"""Candidates of a nucleus that are sorted rather than narrowed further."""


def uniform(seed: int, choice: int, index: int) -> float:
    """In [0, 1): the leading 53 bits of xxh3_64 over the three numbers as u64 little-endian."""
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed, choice, index))
    return (digest >> 11) * 2.0**-53


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int | Exception]:
    """One token a row of `logits` [num_rows, vocab_size], or the exception that struck that row alone."""
    greatest, greedy = logits.max(dim=-1)  # a NaN anywhere in a row is its greatest; equal logits: the first
    sound = greatest.isfinite().tolist()
    tokens: list[int | Exception] = []
    for row, (spec, best) in enumerate(zip(specs, greedy.tolist(), strict=True)):
        if not sound[row]:
            tokens.append(WorkerFault("the model's logits are not finite"))
        elif spec.sampling.temperature == 0:
            tokens.append(best)
        else:
            tokens.append(_draw(logits[row].double() - greatest[row].double(), spec))
    return tokens


def _draw(logits: Tensor, spec: SampleSpec) -> int:
    """Inverse of the distribution over the nucleus; `logits` [vocab_size] in float64, the greatest of them 0."""
    weights = (logits / spec.sampling.temperature).exp_()
    if spec.sampling.top_p < 1:
        candidates = _nucleus(weights, spec.sampling.top_p)
        weights = weights[candidates]
    else:
        candidates = None
    reach = weights.cumsum(0)
    # u <= 1 - 2**-53 keeps the target below the total in float64, so an entry past it exists, and its weight is not 0
    target = reach[-1] * uniform(spec.sampling.seed, spec.choice, spec.index)
    place = torch.searchsorted(reach, target, right=True)
    return int(place if candidates is None else candidates[place])


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Ids, ascending, of the fewest tokens whose share is at least `top_p`; at least one; the lower id of equals.

    Sorting a whole vocabulary takes longer than the rest of a draw tenfold. Quickselect by weight leaves the few
    candidates among which the lightest kept token stands: everything above them is kept, everything below is not.
    """
    needed = weights.sum() * top_p
    candidates, above = weights, weights.new_zeros(())
    while len(candidates) > _SORTED_AT_ONCE:
        heavier = candidates > candidates.mean()
        heavy = candidates[heavier]
        if len(heavy) in (0, len(candidates)):  # all equal, but for the rounding of their mean
            break
        if above + heavy.sum() >= needed:
            candidates = heavy
        else:
            candidates, above = candidates[~heavier], above + heavy.sum()
    ordered = candidates.sort(descending=True).values
    num_kept = max(1, int((above + ordered.cumsum(0) - ordered < needed).sum()))
    least = ordered[num_kept - 1]
    num_equals = num_kept - int((ordered > least).sum())
    equals = (weights == least).nonzero().flatten()[:num_equals]
    kept: Tensor = torch.cat(((weights > least).nonzero().flatten(), equals)).sort().values
    return kept
