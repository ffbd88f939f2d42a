"""What a worker sends of an answer, held to what it was asked for: where it can be checked, nobody is believed."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from prefixcache.errors import WorkerFault
from prefixcache.protocol import StepEntry, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """Those of one entry that were not known and belong to the answer."""

    ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs]
    """One for each where they were asked for."""
    goes_on: bool
    """Whether more came after the end of the answer: its last token, or one that ends it."""


def new_tokens(
    entry: StepEntry,
    output: Sequence[int],
    *,
    max_tokens: int,
    stop_token_ids: Set[int],
    vocab_size: int,
    is_scored: bool,
) -> NewTokens:
    """What `entry` adds to the `output` so far. Raises WorkerFault where it cannot be right."""
    index, ids, logprobs = entry.index, entry.ids, entry.logprobs or ()
    num_before = len(output)
    if not 0 <= index <= num_before:
        raise WorkerFault(f"the worker sent output from token {index} on, where it has {num_before}")
    _check_ids(ids, vocab_size)
    if is_scored:
        if len(logprobs) != len(ids):
            raise WorkerFault("the worker sent tokens without their log probabilities")
        for scored in logprobs:
            _check_ids([token_id for token_id, _ in scored.top], vocab_size)
    num_known = num_before - index
    ids = ids[num_known:]
    room = max_tokens - num_before
    if output and output[-1] in stop_token_ids:
        room = 0
    for place, token_id in enumerate(ids[:room]):
        if token_id in stop_token_ids:
            room = place + 1
            break
    return NewTokens(ids=ids[:room], logprobs=logprobs[num_known:], goes_on=len(ids) > room)


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise WorkerFault(f"the worker sent token {token_id}, its vocabulary has {vocab_size}")


def checked_cached_tokens(said: int, prompt_tokens: int) -> int:
    """No more than there are: what is merely counted wrong is not worth an answer."""
    return min(max(said, 0), prompt_tokens)
