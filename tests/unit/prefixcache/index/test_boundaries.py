"""Boundaries: where a request meets those that share a prefix with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.index.boundaries import DENSE_DEPTHS, Boundaries, boundary_depths
from prefixcache.limits import MAX_MATCH_BLOCKS

LENGTHS = st.integers(1, MAX_MATCH_BLOCKS)


def test_all_up_to_eight_then_two_an_octave_and_the_last_one() -> None:
    assert boundary_depths(0) == ()
    assert boundary_depths(1) == (1,)
    assert boundary_depths(2) == (1, 2)
    assert boundary_depths(5) == (1, 2, 3, 4, 5)
    assert boundary_depths(8) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert boundary_depths(11) == (1, 2, 3, 4, 5, 6, 7, 8, 11)
    assert boundary_depths(12) == (1, 2, 3, 4, 5, 6, 7, 8, 12)
    assert boundary_depths(16) == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    assert boundary_depths(50) == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 50)


@given(LENGTHS)
def test_ascending_from_the_first_block_to_the_last(num_blocks: int) -> None:
    depths = boundary_depths(num_blocks)
    assert list(depths) == sorted(set(depths))
    assert (depths[0], depths[-1]) == (1, num_blocks)
    assert len(depths) <= 2 * num_blocks.bit_length() + 2


@given(LENGTHS, LENGTHS, st.data())
def test_a_shared_prefix_is_met_at_two_thirds_at_least(one: int, other: int, data: st.DataObject) -> None:
    shared = data.draw(st.integers(1, min(one, other)))
    met = max(depth for depth in set(boundary_depths(one)) & set(boundary_depths(other)) if depth <= shared)
    assert met >= shared * 2 / 3
    assert met == shared or shared > DENSE_DEPTHS


@given(LENGTHS)
def test_equal_prompts_meet_whole(num_blocks: int) -> None:
    chain = range(10**6, 10**6 + num_blocks)
    boundaries = Boundaries.of(chain)
    assert boundaries == Boundaries.of(list(chain))
    assert (boundaries.depths[-1], boundaries.hashes[-1]) == (num_blocks, chain[-1])


def test_each_hash_is_that_of_the_block_at_its_depth() -> None:
    assert Boundaries.of([]) == Boundaries(depths=(), hashes=())
    assert Boundaries.of([11, 12, 13, 14, 15]) == Boundaries(depths=(1, 2, 3, 4, 5), hashes=(11, 12, 13, 14, 15))
    assert Boundaries.of(range(100, 111)).hashes == (100, 101, 102, 103, 104, 105, 106, 107, 110)


def test_blocks_that_no_match_looks_at_have_no_boundary() -> None:
    assert Boundaries.of(range(MAX_MATCH_BLOCKS + 5)) == Boundaries.of(range(MAX_MATCH_BLOCKS))
