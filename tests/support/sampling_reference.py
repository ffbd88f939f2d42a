"""What a sampler must draw: the definition, word for word, in plain Python floats."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from worker.draw import uniform
from worker.runner import SampleSpec


def reference_logits(row: Sequence[float], spec: SampleSpec) -> list[float]:
    """Logits after bias, penalties and min_tokens."""
    sampling, logits = spec.sampling, list(row)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in {*spec.prompt_ids, *spec.output_ids}:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(spec.output_ids).items():
        logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    if spec.index < sampling.min_tokens:
        for token in spec.stop_token_ids:
            logits[token] = -math.inf
    return logits


def reference_weights(row: Sequence[float], spec: SampleSpec) -> dict[int, float]:
    """Weight of every token that can be drawn, ascending by id; the temperature is not 0."""
    sampling, logits = spec.sampling, reference_logits(row, spec)
    best = max(logits)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: sampling.top_k]
    weights = {token: math.exp((logits[token] - best) / sampling.temperature) for token in order}
    total, mass, kept = math.fsum(weights.values()), 0.0, list[int]()
    for token in order:
        if kept and mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return {token: weights[token] for token in sorted(kept) if weights[token] >= sampling.min_p}


def reference_token(row: Sequence[float], spec: SampleSpec) -> int:
    """The greatest, or the inverse of the distribution by ascending id at the draw's number."""
    if spec.sampling.temperature == 0:
        logits = reference_logits(row, spec)
        return logits.index(max(logits))
    weights = reference_weights(row, spec)
    target = uniform(spec.sampling.seed, spec.choice, spec.index) * math.fsum(weights.values())
    reach = itertools.accumulate(weights.values())
    return next(token for token, reached in zip(weights, reach, strict=True) if reached > target)
