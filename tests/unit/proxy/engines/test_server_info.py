"""SGLang's own account of its KV cache."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.server_info import ServerInfo, read_server_info
from tests.support.engine_answers import SGLANG_INFO


def test_sglang() -> None:
    assert read_server_info(SGLANG_INFO) == ServerInfo(block_size=1, capacity_tokens=442_368, caches_prefixes=True)


def test_pages_and_data_parallel_ranks() -> None:
    body = msgspec.json.encode(
        {"page_size": 64, "dp_size": 2, "max_total_num_tokens": 1_000, "disable_radix_cache": True}
    )
    assert read_server_info(body) == ServerInfo(block_size=64, capacity_tokens=2_000, caches_prefixes=False)


def test_the_capacity_may_stand_with_the_ranks() -> None:
    body = msgspec.json.encode({"page_size": None, "internal_states": [3, {"max_total_num_tokens": 900}, {}]})
    assert read_server_info(body) == ServerInfo(block_size=1, capacity_tokens=900)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"no", b"[" * 100_000])
def test_what_is_another_answer(body: bytes) -> None:
    assert read_server_info(body) is None


@pytest.mark.parametrize("tokens", [b"null", b"-4", b"0", b"1.5", b"true", b"1e300", b'"5"', b"[5]"])
def test_what_is_no_capacity(tokens: bytes) -> None:
    assert read_server_info(b'{"page_size": 1, "max_total_num_tokens": ' + tokens + b"}") is None


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.lists(st.dictionaries(st.just("max_total_num_tokens"), st.integers(0, 99)) | st.none(), max_size=3)
)
_KEYS = st.sampled_from(["page_size", "dp_size", "max_total_num_tokens", "internal_states", "disable_radix_cache"])


@given(st.dictionaries(_KEYS, _VALUES))
def test_any_values_are_positive_or_none(value: dict[str, object]) -> None:
    info = read_server_info(msgspec.json.encode(value))
    if info is not None:
        assert info.block_size and info.capacity_tokens and info.block_size > 0 and info.capacity_tokens > 0
