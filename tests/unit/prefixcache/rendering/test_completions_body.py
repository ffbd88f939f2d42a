from __future__ import annotations

from array import array
from typing import Any

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.completions_body import completion_form


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ("Hi",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], (array("I", [1, 2]),)),
        ([[1], [2, 3]], (array("I", [1]), array("I", [2, 3]))),
        (["a", [1]], ("a", array("I", [1]))),
    ],
)
def test_texts_and_ids(prompt: Any, prompts: tuple[Any, ...]) -> None:
    form = completion_form({"prompt": prompt})
    assert form.prompts == prompts
    assert form.add_special_tokens


def test_special_tokens_can_be_declined() -> None:
    assert not completion_form({"prompt": "Hi", "add_special_tokens": False}).add_special_tokens


@pytest.mark.parametrize("prompt", [None, 5, 1.5, {}, [], [[]], [True], [1, "a"], [1.0], [[1], None], [None]])
def test_odd_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        completion_form({"prompt": prompt})


@pytest.mark.parametrize("id", [-1, 2**32, 10**30])
def test_ids_that_are_none(id: int) -> None:
    with pytest.raises(OverflowError):
        completion_form({"prompt": [1, id]})
