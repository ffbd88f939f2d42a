"""What of a worker's tokens is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.errors import WorkerFault
from prefixcache.protocol import StepEntry, TokenLogprobs
from proxy.output_check import NewTokens, checked_cached_tokens, new_tokens

STOP = 7
VOCABULARY = 512


def checked(
    index: int,
    *ids: int,
    output: tuple[int, ...] = (),
    max_tokens: int = 100,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    is_scored: bool = False,
) -> NewTokens:
    return new_tokens(
        StepEntry(id="a", index=index, ids=ids, logprobs=logprobs),
        output,
        max_tokens=max_tokens,
        stop_token_ids={STOP},
        vocab_size=VOCABULARY,
        is_scored=is_scored,
    )


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**31, 2**32 - 1, 2**32, 2**63])
@pytest.mark.parametrize("place", [0, 2])
def test_ids_that_no_vocabulary_has(bad: int, place: int) -> None:
    ids = [1, 2, 3]
    ids[place] = bad
    with pytest.raises(WorkerFault, match=f"sent token {bad}, its vocabulary has 512"):
        checked(0, *ids)
    scored = TokenLogprobs(-0.5, ((3, -0.5), (bad, -1.0)))
    with pytest.raises(WorkerFault, match=f"sent token {bad}"):
        checked(0, 1, logprobs=(scored,), is_scored=True)


def test_the_last_id_of_the_vocabulary_is_one() -> None:
    assert checked(0, 0, VOCABULARY - 1).ids == (0, VOCABULARY - 1)


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_tokens_out_of_place(index: int) -> None:
    with pytest.raises(WorkerFault, match=f"from token {index} on, where it has 2"):
        checked(index, 1, output=(1, 2))


@pytest.mark.parametrize("logprobs", [None, (), (TokenLogprobs(-1.0),) * 3])
def test_tokens_without_their_log_probabilities(logprobs: tuple[TokenLogprobs, ...] | None) -> None:
    with pytest.raises(WorkerFault, match="without their log probabilities"):
        checked(0, 1, 2, logprobs=logprobs, is_scored=True)


def test_what_came_before_comes_once() -> None:
    scores = tuple(TokenLogprobs(-float(n)) for n in range(4))
    new = checked(1, 2, 3, 4, 5, output=(1, 2, 3), logprobs=scores, is_scored=True)
    assert (new.ids, new.logprobs, new.goes_on) == ((4, 5), scores[2:], False)
    assert checked(0, 1, 2, output=(1, 2, 3)) == NewTokens(ids=(), logprobs=(), goes_on=False)


@given(
    output=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    ids=st.lists(st.integers(0, 8), max_size=6).map(tuple),
    room=st.integers(0, 6),
)
def test_nothing_is_taken_after_the_end(output: tuple[int, ...], ids: tuple[int, ...], room: int) -> None:
    new = checked(len(output), *ids, output=output, max_tokens=len(output) + room)
    kept: list[int] = []
    for token_id in ids:
        if len(kept) == room or STOP in kept:
            break
        kept.append(token_id)
    assert (new.ids, new.goes_on) == (tuple(kept), len(kept) < len(ids))


def test_nothing_is_taken_after_a_token_that_ended_it_before() -> None:
    assert checked(2, 3, output=(1, STOP)) == NewTokens(ids=(), logprobs=(), goes_on=True)
    assert not checked(1, STOP, output=(1, STOP)).goes_on, "it says again what is known"


def test_cached_tokens_are_of_the_prompt() -> None:
    assert [checked_cached_tokens(said, 10) for said in (-1, 0, 4, 10, 11)] == [0, 0, 4, 10, 10]
