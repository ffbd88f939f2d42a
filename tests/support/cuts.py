"""Cuts a sequence anywhere, as reads and engine steps do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

Sliceable = TypeVar("Sliceable", bound=Sequence[object])


def cut(whole: Sliceable, data: st.DataObject) -> list[Sliceable]:
    """Parts of any length, empty ones too, that joined are the whole."""
    places = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12), label="cuts"))
    return [whole[begin:end] for begin, end in zip([0, *places], [*places, len(whole)], strict=True)]  # type: ignore[misc]
