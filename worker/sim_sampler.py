"""Draws a token from the logits of the simulated model: the rules of the torch sampler, in plain Python.

Only tokens that may follow, and those that the request itself raises or lowers, take part; so a token costs 20 us of
CPU. All others stand on the floor, where their share is nil (under 1e-8 at temperature 2), and are never drawn.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from prefixcache.errors import WorkerFault
from prefixcache.protocol import TokenLogprobs
from worker.draw import uniform
from worker.runner import Drawn, SampleSpec
from worker.sim_model import FLOOR_LOGIT, VOCAB_SIZE


def draw(logits: Mapping[int, float], spec: SampleSpec, *, forced: int | None = None) -> Drawn:
    """The next token, or the one that is forced. Raises WorkerFault if the request leaves no token to draw."""
    token = _drawn(logits, spec) if forced is None else forced
    num_top = spec.sampling.top_logprobs
    return Drawn(token_id=token, logprobs=None if num_top is None else _logprobs(logits, token, num_top))


def _drawn(logits: Mapping[int, float], spec: SampleSpec) -> int:
    altered = _altered(logits, spec)
    return _sampled(altered, spec) if spec.sampling.temperature else _greatest(altered)


def _greatest(logits: Mapping[int, float]) -> int:
    """The first of equals."""
    return max(logits, key=lambda token: (logits[token], -token))


# --- what the request asks to be changed --------------------------------------------------------------------


def _altered(logits: Mapping[int, float], spec: SampleSpec) -> dict[int, float]:
    sampling = spec.sampling
    altered = dict(logits)
    for token, bias in sampling.logit_bias.items():
        altered[token] = altered.get(token, FLOOR_LOGIT) + bias
    if sampling.repetition_penalty != 1:
        for token in {*spec.prompt_ids, *spec.output_ids}:
            logit = altered.get(token, FLOOR_LOGIT)
            altered[token] = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(spec.output_ids).items():
            penalty = sampling.presence_penalty + count * sampling.frequency_penalty
            altered[token] = altered.get(token, FLOOR_LOGIT) - penalty
    if max(altered.values()) < FLOOR_LOGIT:  # what was on the floor stands above every candidate now
        altered = {**dict.fromkeys(range(VOCAB_SIZE), FLOOR_LOGIT), **altered}
    if spec.index < sampling.min_tokens:
        altered = _without(spec.stop_token_ids, altered)
    return altered


def _without(banned: frozenset[int], logits: Mapping[int, float]) -> dict[int, float]:
    """The logits of the other tokens; of those on the floor if there are no others."""
    allowed = {token: logit for token, logit in logits.items() if token not in banned}
    allowed = allowed or dict.fromkeys(set(range(VOCAB_SIZE)) - banned, FLOOR_LOGIT)
    if not allowed:
        raise WorkerFault("logit_bias, penalties and min_tokens leave no token to draw")
    return allowed


# --- drawing ------------------------------------------------------------------------------------------------


def _sampled(logits: Mapping[int, float], spec: SampleSpec) -> int:
    sampling = spec.sampling
    greatest = max(logits.values())
    weights = {token: math.exp((logit - greatest) / sampling.temperature) for token, logit in logits.items()}
    kept = sorted(weights, key=lambda token: (-weights[token], token))[: sampling.top_k]
    if sampling.top_p < 1:
        kept = _nucleus(kept, weights, sampling.top_p)
    kept = sorted(token for token in kept if weights[token] >= sampling.min_p)
    reach = list(accumulate(weights[token] for token in kept))
    return kept[bisect_right(reach, reach[-1] * uniform(sampling.seed, spec.choice, spec.index))]


def _nucleus(ordered: list[int], weights: Mapping[int, float], top_p: float) -> list[int]:
    """The fewest leading tokens whose share is at least `top_p`; at least one."""
    needed = top_p * sum(weights[token] for token in ordered)
    reach = accumulate(weights[token] for token in ordered)
    return ordered[: next((size for size, mass in enumerate(reach, 1) if mass >= needed), len(ordered))]


# --- log probabilities --------------------------------------------------------------------------------------


def _logprobs(logits: Mapping[int, float], token: int, num_top: int) -> TokenLogprobs:
    """Of the model's own distribution over the whole vocabulary, the floor included."""
    floor = (VOCAB_SIZE - len(logits)) * math.exp(FLOOR_LOGIT)
    normalizer = math.log(sum(map(math.exp, logits.values())) + floor)
    every = {id: logits.get(id, FLOOR_LOGIT) - normalizer for id in range(VOCAB_SIZE)}
    best = sorted(every.items(), key=lambda item: (-item[1], item[0]))[:num_top]
    return TokenLogprobs(every[token], tuple(best))
