"""How low the hit rate fell, and since when it is back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.compose.account import Account, Outcome
from tests.compose.recovery import WINDOW, hit_rate, recovery

BEGAN_AT = 100.0
BETWEEN_S = 0.05


def answers(cached: Sequence[int], *, outcome: Outcome = Outcome.RIGHT, from_s: float = 0.0) -> list[Account]:
    """One every BETWEEN_S, asked that much before its end, of 100 tokens each."""
    asked = [BEGAN_AT + from_s + BETWEEN_S * number for number in range(len(cached))]
    return [
        Account(
            is_stream=False,
            asked_at=at,
            ended_at=at + BETWEEN_S,
            outcome=outcome,
            prompt_tokens=100,
            cached_tokens=tokens,
        )
        for at, tokens in zip(asked, cached, strict=True)
    ]


def test_hit_rate_is_of_tokens() -> None:
    assert hit_rate([]) == 0.0
    assert hit_rate(answers([100, 0, 50, 50])) == 0.5


def test_a_fault_that_changes_nothing() -> None:
    found = recovery(answers([90] * 2 * WINDOW), before=0.9, began_at=BEGAN_AT, healed_at=BEGAN_AT)
    assert (found.lowest, found.last, found.low_until_s, found.is_back) == (0.9, 0.9, 0.0, True)


def test_a_fall_and_a_return() -> None:
    cached = [90] * WINDOW + [0] * WINDOW + [90] * 2 * WINDOW
    found = recovery(answers(cached), before=0.9, began_at=BEGAN_AT, healed_at=BEGAN_AT + 1.0)
    assert (found.lowest, found.last, found.is_back) == (0.0, 0.9, True)
    # The last window below 95 % holds three of the answers without a hit: 3/40 is more than 5 %, 2/40 is not.
    assert found.low_until_s == pytest.approx(BETWEEN_S * (3 * WINDOW - 3))


def test_it_is_back_only_after_a_whole_window_that_was_asked_after_the_fault() -> None:
    good = answers([90] * 2 * WINDOW)
    healed_at = BEGAN_AT + BETWEEN_S * (WINDOW + 0.5)
    assert not recovery(good, before=0.9, began_at=BEGAN_AT, healed_at=healed_at).is_back
    assert recovery(good, before=0.9, began_at=BEGAN_AT, healed_at=healed_at - BETWEEN_S).is_back
    bad = answers([80] * 2 * WINDOW)
    assert not recovery(bad, before=0.9, began_at=BEGAN_AT, healed_at=BEGAN_AT).is_back


def test_only_right_answers_that_were_asked_since_count() -> None:
    cut = answers([0] * WINDOW, outcome=Outcome.CUT)
    earlier = answers([0] * WINDOW, from_s=-10.0)
    good = answers([90] * WINDOW)
    found = recovery([*earlier, *cut, *good], before=0.9, began_at=BEGAN_AT, healed_at=BEGAN_AT)
    assert (found.lowest, found.is_back) == (0.9, True)
    assert not recovery([], before=0.9, began_at=BEGAN_AT, healed_at=BEGAN_AT).is_back
