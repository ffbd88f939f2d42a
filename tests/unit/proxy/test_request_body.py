"""Which bodies are not taken apart."""

from __future__ import annotations

import pytest

from prefixcache.limits import MAX_BODY_COLONS, MAX_BODY_COMMAS, MAX_BODY_LISTS
from proxy import request_body
from proxy.request_body import has_too_many_parts


@pytest.mark.parametrize(
    ("part", "most"),
    [(b"[]", MAX_BODY_LISTS), (b"{}", MAX_BODY_LISTS), (b"1,", MAX_BODY_COMMAS), (b'"":', MAX_BODY_COLONS)],
)
def test_parts_are_counted_to_the_last_one(part: bytes, most: int) -> None:
    assert not has_too_many_parts(part * most)
    assert has_too_many_parts(part * (most + 1))
    assert has_too_many_parts(b" " * request_body._COUNTED_BYTES + part * most + b" " + part)


def test_lists_and_objects_count_together() -> None:
    assert has_too_many_parts(b"[" * (MAX_BODY_LISTS // 2) + b"{" * (MAX_BODY_LISTS // 2) + b"[")
    assert not has_too_many_parts(b"[" * (MAX_BODY_LISTS // 2) + b"{" * (MAX_BODY_LISTS // 2))


def test_fewer_commas_may_be_allowed() -> None:
    body = b"1," * MAX_BODY_LISTS
    assert not has_too_many_parts(body, most_commas=MAX_BODY_LISTS)
    assert has_too_many_parts(body, most_commas=MAX_BODY_LISTS - 1)


def test_long_text_is_no_part() -> None:
    assert not has_too_many_parts(b"word " * (request_body._COUNTED_BYTES * 3))
