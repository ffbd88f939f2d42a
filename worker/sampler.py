"""Draws the next token of each sequence from its logits.

    logits ─┬─ log_softmax in float32 ──────────────────────────────────────────────────────────► logprobs
            └─ logit_bias ─ penalties ─ min_tokens ─┬─ greatest (temperature 0) ────────────────► token
                                                    └─ top_k ─ temperature ─ top_p ─ min_p ─ draw ─► token

The draw for output token n depends on (seed, choice, n) alone, not on what was drawn before or on the neighbours in the
batch: another worker can go on with the same sequence, and a repeated request gives the same text. Everything beside
the log probabilities is computed in float64. Of tokens equally likely the lower id comes first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache.errors import WorkerFault
from prefixcache.protocol import LEAST_LOGPROB, TokenLogprobs
from worker.draw import uniform
from worker.runner import Drawn, SampleSpec

_SORTED_AT_ONCE = 256
"""Candidates of a nucleus that are sorted rather than narrowed further."""


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[Drawn | Exception]:
    """One token a row of `logits` [num_rows, vocab_size], or the exception that struck that row alone.

    Rows go one after the other: one fits into the CPU's cache, where a batch of 32 in float64 does not and takes five
    times as long.
    """
    greatest, greedy = logits.max(dim=-1)  # a NaN anywhere in a row is its greatest; equal logits: the first
    sound = greatest.isfinite().tolist()
    results: list[Drawn | Exception] = []
    for row, (spec, best) in enumerate(zip(specs, greedy.tolist(), strict=True)):
        if not sound[row]:
            results.append(WorkerFault("the model's logits are not finite"))
            continue
        try:
            token = _token(logits[row], greatest[row], best, spec)
            results.append(Drawn(token_id=token, logprobs=_logprobs(logits[row], token, spec)))
        except Exception as error:
            results.append(error)  # the engine logs it and fails this request
    return results


# --- the token --------------------------------------------------------------------------------------------


def _token(logits: Tensor, greatest: Tensor, best: int, spec: SampleSpec) -> int:
    """`logits` [vocab_size]; `best` is the place of the `greatest`."""
    is_greedy, is_plain = spec.sampling.temperature == 0, not _changes_logits(spec)
    if is_greedy and is_plain:
        return best
    row = logits.to(torch.float64, copy=True)
    if is_plain:
        return _draw(row.sub_(greatest), spec)
    greatest, place = _change(row, spec).max(dim=-1)
    if not greatest.isfinite():
        raise WorkerFault("logit_bias, penalties and min_tokens leave no token to draw")
    return int(place) if is_greedy else _draw(row.sub_(greatest), spec)


def _changes_logits(spec: SampleSpec) -> bool:
    sampling = spec.sampling
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or (spec.stop_token_ids and spec.index < sampling.min_tokens)
    )


def _change(logits: Tensor, spec: SampleSpec) -> Tensor:
    """Bias, penalties and min_tokens applied to `logits` [vocab_size] in place, in vLLM's order."""
    sampling = spec.sampling
    if sampling.logit_bias:
        logits[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype)
    if sampling.repetition_penalty != 1:
        seen = torch.cat((_ids(spec.prompt_ids), _ids(spec.output_ids)))
        values = logits[seen]  # an id that stands here twice is written twice with the same value
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        output = _ids(spec.output_ids)
        drawn, counts = output.unique(return_counts=True)  # type: ignore[no-untyped-call]  # torch lacks the hint
        logits[drawn] -= counts.double() * sampling.frequency_penalty + sampling.presence_penalty
    if spec.stop_token_ids and spec.index < sampling.min_tokens:
        logits[list(spec.stop_token_ids)] = -torch.inf
    return logits


def _ids(ids: Sequence[int]) -> Tensor:
    """[len(ids)] in int64."""
    return torch.frombuffer(array("I", ids), dtype=torch.int32).long() if ids else torch.empty(0, dtype=torch.int64)


def _draw(logits: Tensor, spec: SampleSpec) -> int:
    """Inverse of the distribution over the candidates; `logits` [vocab_size] in float64, the greatest of them 0."""
    sampling = spec.sampling
    candidates: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < len(logits):
        candidates = _most_likely(logits, sampling.top_k)
        logits = logits[candidates]
    weights = logits.div_(sampling.temperature).exp_()
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        candidates, weights = _narrowed(candidates, kept), weights[kept]
    if sampling.min_p > 0:
        kept = (weights >= sampling.min_p).nonzero().flatten()  # the greatest weight is 1 and never dropped
        candidates, weights = _narrowed(candidates, kept), weights[kept]
    reach = weights.cumsum(0)
    # u <= 1 - 2**-53 keeps the target below the total in float64, so an entry past it exists, and its weight is not 0
    target = reach[-1] * uniform(sampling.seed, spec.choice, spec.index)
    place = torch.searchsorted(reach, target, right=True)
    return int(place if candidates is None else candidates[place])


def _narrowed(candidates: Tensor | None, kept: Tensor) -> Tensor:
    return kept if candidates is None else candidates[kept]


def _most_likely(values: Tensor, count: int) -> Tensor:
    """Places, ascending, of the `count` greatest values; the lower place of equals."""
    greatest = values.topk(count).values
    return _down_to(values, greatest[-1], int((greatest == greatest[-1]).sum()))


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Places, ascending, of the fewest weights whose share is at least `top_p`; at least one; the lower of equals.

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
    return _down_to(weights, least, num_kept - int((ordered > least).sum()))


def _down_to(values: Tensor, least: Tensor, num_equals: int) -> Tensor:
    """Places, ascending, of all values above `least` and of the first `num_equals` that equal it."""
    places = (values >= least).nonzero().flatten()
    is_equal = values[places] == least
    return places[~is_equal | (is_equal.cumsum(0) <= num_equals)]


# --- log probabilities ------------------------------------------------------------------------------------


def _logprobs(logits: Tensor, token: int, spec: SampleSpec) -> TokenLogprobs | None:
    """Of the drawn `token` and of the most likely ones, where they are asked for; `logits` [vocab_size].

    The order is that of the logits: greedy's token comes first even where rounding makes neighbours equally likely.
    """
    if spec.sampling.top_logprobs is None:
        return None
    logprobs = logits.float().log_softmax(dim=-1)
    drawn = max(float(logprobs[token]), LEAST_LOGPROB)
    count = min(spec.sampling.top_logprobs, len(logits))
    if not count:
        return TokenLogprobs(drawn)
    most = _most_likely(logits, count)
    most = most[logits[most].argsort(descending=True, stable=True)]
    values = logprobs[most].clamp(min=LEAST_LOGPROB).tolist()
    return TokenLogprobs(drawn, tuple(zip(most.tolist(), values, strict=True)))
