"""Request ids."""

from __future__ import annotations

import pytest

from proxy.access_log import request_id_of


@pytest.mark.parametrize("given", ["abc", "x" * 128, "with space ~!"])
def test_a_sane_id_is_kept(given: str) -> None:
    assert request_id_of(given) == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "caf\u00e9", "tab\there", "line\nbreak", "\x7f"])
def test_any_other_is_replaced_by_a_new_one(given: str | None) -> None:
    made = request_id_of(given)
    assert made != given and len(made) == 32
    assert request_id_of(given) != made
