from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.rendering.control_tokens import (
    JOINT_MARK as J,
)
from prefixcache.rendering.control_tokens import (
    START_MARK as S,
)
from prefixcache.rendering.control_tokens import (
    ControlTokens,
    marks_in_ascii_json,
    unmark,
)

CONTROL = ControlTokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("nothing here", "nothing here"),
        ("", ""),
        ("a <|im_end|> b<s>", f"a {S}<|im_end|> b{S}<s>"),
        ("1 < 2 > 0", "1 < 2 > 0"),
        ("so <|im_", f"so <|im_{J}"),
        ("so <|im_ \n", f"so <|im_{J} \n"),
        ("  end|> it is", f"  {J}end|> it is"),
        ("<", f"<{J}"),
        (">", f"{J}>"),
        (f"a{S}{J}b<{S}s>", f"ab{S}<s>"),
    ],
)
def test_marks(text: str, marked: str) -> None:
    assert CONTROL.mark(text) == marked
    assert unmark(CONTROL.mark(text)).text == text.replace(S, "").replace(J, "")


def test_a_spelling_with_blanks_at_its_ends_is_cut_too() -> None:
    control = ControlTokens([" <s> "])
    assert control.mark("x ") == f"x {J}"
    assert control.mark(" x") == f"{J} x" or control.mark(" x") == " x"
    prompt = unmark(f"{control.mark('x ')}<s> ")
    assert prompt.is_callers(1, 5)


def test_keys_lists_and_scalars() -> None:
    data = {"a<s>": ["<s>", 1, 2.5, None, True, ("x", {"y": "</s>"})]}
    assert CONTROL.mark(data) == {f"a{S}<s>": [f"{S}<s>", 1, 2.5, None, True, ["x", {"y": f"{S}</s>"}]]}
    assert data == {"a<s>": ["<s>", 1, 2.5, None, True, ("x", {"y": "</s>"})]}


def test_no_control_tokens_leave_all_as_it_is() -> None:
    assert ControlTokens([]).mark("a <s>") == "a <s>"


def test_places_are_those_in_the_text_without_marks() -> None:
    prompt = unmark(f"<s>{S}<s>a{J}b{S}")
    assert prompt.text == "<s><s>ab"
    assert (prompt.starts, prompt.joints) == ((3, 8), (7,))


@pytest.mark.parametrize(
    ("rendered", "callers"),
    [
        ("<s>", False),
        (f"{S}<s>", True),
        (f"<{S}s>", True),
        (f"<{J}s>", True),
        (f"<s{S}>", True),
        (f"{J}<s>", False),
        (f"<s>{J}", False),
        (f"<s>{S}", False),
    ],
)
def test_whose_spelling_it_is(rendered: str, callers: bool) -> None:
    prompt = unmark(rendered)
    assert prompt.is_callers(0, 3) is callers


@given(st.lists(st.sampled_from([S, J, "\\", "U000f0000", "é", "'", '"', "\n", "<s>", "x"]), max_size=12))
def test_repr_and_ascii_json_keep_marks_and_change_nothing_else(parts: list[str]) -> None:
    text = CONTROL.mark("".join(parts))
    plain = "".join(parts).replace(S, "").replace(J, "")
    assert unmark(repr([text])).text == repr([plain])
    assert unmark(marks_in_ascii_json(json.dumps([text]))).text == json.dumps([plain])
    num_marks = text.count(S) + text.count(J)
    assert len(unmark(repr(text)).starts) + len(unmark(repr(text)).joints) == num_marks
