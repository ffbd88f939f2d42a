"""When a long prefill makes room, and what may pass."""

from __future__ import annotations

import pytest

from prefixcache.routing.slices import is_to_be_sliced, may_pass, slice_tokens

SLICE = 2_000


@pytest.mark.parametrize(
    ("prefill_rate", "tokens"),
    [(4_000.0, 6_000), (684.0, 1_026), (682.0, 1_024), (None, 1_500), (1e12, 1.5 * 10**12)],
)
def test_a_slice_takes_so_long_and_has_a_least_size(prefill_rate: float | None, tokens: int) -> None:
    assert slice_tokens(prefill_rate) == tokens


@pytest.mark.parametrize(("uncached_tokens", "passes"), [(0, True), (3_000, True), (3_001, False)])
def test_up_to_one_slice_and_a_half_may_pass_and_is_not_cut(uncached_tokens: int, passes: bool) -> None:
    assert may_pass(uncached_tokens, SLICE, 5_000) is passes
    assert is_to_be_sliced(uncached_tokens, SLICE, 10_000, 100_000, 0) is not passes


@pytest.mark.parametrize(
    ("left_tokens", "most_tokens"),
    [(100_000, 50_000), (6_002, 3_001), (6_000, 3_000), (5_000, 3_000), (1, 3_000)],
)
def test_half_of_what_is_left_of_a_sliced_one_may_pass_it(left_tokens: int, most_tokens: int) -> None:
    assert may_pass(most_tokens, SLICE, left_tokens)
    assert not may_pass(most_tokens + 1, SLICE, left_tokens)
    assert may_pass(most_tokens + 1, SLICE, None)


def test_few_prefills_stand_cut_at_a_time() -> None:
    """As many as pass each other, each the longest that may."""
    left_tokens, num_cut = 100_000, 0
    while is_to_be_sliced(left_tokens, SLICE, left_tokens, 10**9, 0):
        num_cut += 1
        left_tokens = max(tokens for tokens in range(left_tokens + 1) if may_pass(tokens, SLICE, left_tokens))
    assert num_cut == 6


@pytest.mark.parametrize(
    ("prompt_tokens", "capacity_tokens", "computed_tokens", "is_sliced"),
    [
        (10_000, 10_000, 0, True),
        (10_001, 10_000, 0, False),
        (10_000, 10_000, 14_999, True),
        (10_000, 10_000, 15_000, False),
    ],
    ids=["fits", "does not fit the cache", "most of it was evicted meanwhile", "was computed one and a half times"],
)
def test_guards(prompt_tokens: int, capacity_tokens: int, computed_tokens: int, is_sliced: bool) -> None:
    assert is_to_be_sliced(5_000, SLICE, prompt_tokens, capacity_tokens, computed_tokens) is is_sliced


def test_a_long_prefill_ends_after_a_bounded_number_of_slices_whatever_is_evicted() -> None:
    """The worst cache: every slice is gone when the next one begins."""
    prompt_tokens, computed_tokens, num_slices = 20_000, 0, 0
    while is_to_be_sliced(prompt_tokens, SLICE, prompt_tokens, 20_000, computed_tokens):
        computed_tokens += SLICE
        num_slices += 1
    assert num_slices == 15
