"""Every answer gets the one name that is right for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.compose.account import NOTHING, STREAMS, Account, Allowance, Outcome, Seen, account_of
from tests.support.sim_oracle import ExpectedAnswer

TRUE = ExpectedAnswer(text="a river", finish_reason="stop", prompt_tokens=9, completion_tokens=8)


def seen(text: str = "a river", **fields: Any) -> Seen:
    whole: dict[str, Any] = {"finish_reason": "stop", "prompt_tokens": 9, "completion_tokens": 8, "cached_tokens": 4}
    whole["has_begun"] = True
    return Seen(text=text, **{**whole, "arrivals": [1.0, 1.5, 3.0], **fields})


def account(it: Seen, *, error: str | None = None, was_told: bool = False, attempts: tuple[str, ...] = ()) -> Account:
    return account_of(
        it,
        TRUE,
        is_stream=True,
        asked_at=0.5,
        ended_at=4.0,
        error=error,
        was_told=was_told,
        failed_attempts=attempts,
    )


PART: dict[str, Any] = {"finish_reason": None, "prompt_tokens": None, "completion_tokens": None, "cached_tokens": 0}
NOTHING_SEEN = Seen()


@pytest.mark.parametrize(
    ("it", "outcome"),
    [
        (seen(), Outcome.RIGHT),
        (seen("a rivver"), Outcome.WRONG),
        (seen("a rive"), Outcome.WRONG),
        (seen(finish_reason="length"), Outcome.WRONG),
        (seen(prompt_tokens=8), Outcome.WRONG),
        (seen(completion_tokens=9), Outcome.WRONG),
        (seen(cached_tokens=10), Outcome.WRONG),
        (seen("a ri", **PART), Outcome.UNFINISHED),
        (seen(finish_reason=None), Outcome.UNFINISHED),
        (seen(prompt_tokens=None), Outcome.UNFINISHED),
        (seen("", arrivals=[], **PART), Outcome.UNFINISHED),
    ],
)
def test_an_end_that_looks_whole(it: Seen, outcome: Outcome) -> None:
    assert account(it).outcome is outcome


def test_an_end_that_the_client_notices() -> None:
    assert account(seen("a ri", **PART), error="reset").outcome is Outcome.CUT
    assert account(seen("a ri", **PART), error="no worker", was_told=True).outcome is Outcome.TOLD
    assert account(seen("", arrivals=[], **PART), error="reset").outcome is Outcome.CUT
    assert account(NOTHING_SEEN, error="503").outcome is Outcome.FAILED
    assert account(seen("a sea", **PART), error="reset").outcome is Outcome.WRONG, "what came before it counts"


def test_times_and_tokens() -> None:
    whole = account(seen())
    assert (whole.first_token_s, whole.longest_gap_s) == (0.5, 1.5)
    assert (whole.prompt_tokens, whole.cached_tokens) == (9, 4)
    failed = account(NOTHING_SEEN, error="503")
    assert (failed.first_token_s, failed.longest_gap_s, failed.prompt_tokens) == (3.5, 0.0, 0)


@pytest.mark.parametrize("outcome", Outcome)
def test_what_is_allowed(outcome: Outcome) -> None:
    it = replace(account(seen()), outcome=outcome, why="so")
    assert bool(NOTHING.broken_by([it])) == (outcome is not Outcome.RIGHT)
    assert bool(STREAMS.broken_by([it])) == (outcome not in (Outcome.RIGHT, Outcome.CUT))


def test_a_retry_is_seen_even_though_it_succeeded() -> None:
    retried = account(seen(), attempts=("503", "ConnectError"))
    assert retried.outcome is Outcome.RIGHT
    assert NOTHING.broken_by([retried]) and not STREAMS.broken_by([retried])
    assert "ConnectError" in NOTHING.broken_by([retried])[0]
    assert not Allowance().broken_by([account(seen())])
