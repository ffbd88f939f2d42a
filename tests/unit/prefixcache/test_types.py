from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.types import CacheGeometry, EngineGeometry, Unit, num_common_tokens, pack_tokens, unpack_tokens


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_packing(ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(ids)).tolist() == ids


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens([1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_ids_outside_32_bits_are_refused(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_tokens(ids)


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"\0\0\0\0\0")


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"), [(0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (128, 112), (129, 128)]
)
def test_one_token_is_always_computed(prompt_tokens: int, expected: int) -> None:
    assert CacheGeometry().reusable_tokens(prompt_tokens) == expected


@pytest.mark.parametrize(
    ("matched", "prompt_tokens", "expected"),
    [
        (0, 1_000, 0),
        (1, 1_000, 64),
        (15, 1_000, 960),
        (2, 128, 112),  # the whole prompt is claimed: its last block is computed again
        (2, 129, 128),
        (3, 130, 128),  # a claim beyond the prompt says nothing about it
        (1, 1, 0),
    ],
)
def test_predicted_hit_tokens(matched: int, prompt_tokens: int, expected: int) -> None:
    assert CacheGeometry().predicted_hit_tokens(matched, prompt_tokens) == expected


@given(st.integers(0, 100), st.integers(0, 5_000), st.sampled_from([1, 16, 64]), st.sampled_from([1, 4]))
def test_prediction_is_whole_blocks_and_leaves_a_token(
    matched: int, prompt_tokens: int, block_size: int, stride: int
) -> None:
    geometry = CacheGeometry(block_size=block_size, stride=stride)
    predicted = geometry.predicted_hit_tokens(matched, prompt_tokens)
    assert predicted % block_size == 0
    assert 0 <= predicted <= max(prompt_tokens - 1, 0)
    assert predicted <= matched * geometry.index_block_tokens


@pytest.mark.parametrize(
    ("unit", "block_size", "units", "width"),
    [("token", 16, 64, 256), ("token", 128, 128, 512), ("byte", 16, 256, 256), ("byte", 128, 256, 256)],
)
def test_index_blocks_of_an_engine(unit: Unit, block_size: int, units: int, width: int) -> None:
    geometry = EngineGeometry(unit=unit, block_size=block_size)
    assert (geometry.index_block_units, geometry.index_block_bytes) == (units, width)


@pytest.mark.parametrize(
    ("unit", "block_size", "tokens_per_unit", "matched", "prompt_tokens", "expected"),
    [
        ("token", 16, 1.0, 2, 1_000, 128),
        ("token", 16, 1.0, 2, 128, 112),  # its last block is computed again
        ("token", 32, 1.0, 3, 200, 192),
        ("byte", 16, 0.25, 2, 1_000, 128),
        ("byte", 16, 0.3, 1, 1_000, 64),  # 76.8 tokens, of which whole blocks
        ("byte", 16, 0.5, 8, 500, 496),  # the estimate goes beyond the prompt
        ("byte", 16, 0.25, 0, 0, 0),
    ],
)
def test_predicted_hit_tokens_of_an_engine(
    unit: Unit, block_size: int, tokens_per_unit: float, matched: int, prompt_tokens: int, expected: int
) -> None:
    geometry = EngineGeometry(unit=unit, block_size=block_size)
    assert geometry.predicted_hit_tokens(matched, prompt_tokens, tokens_per_unit=tokens_per_unit) == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2, 4], 2), ([256, 1], [512, 1], 0), ([1 << 31], [1], 0)],
)
def test_tokens_in_common_are_whole_ones(one: list[int], other: list[int], expected: int) -> None:
    assert num_common_tokens(pack_tokens(one), pack_tokens(other)) == expected
    assert num_common_tokens(pack_tokens(other), pack_tokens(one)) == expected
