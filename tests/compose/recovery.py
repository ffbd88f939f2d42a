"""The hit rate around a fault: how low it fell and when it was back. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.compose.account import Account, Outcome

WINDOW = 40
"""Answers whose hit rate is taken together: two seconds at twenty requests a second."""
BACK = 0.95
"""Of what it was before: enough for it to be back."""


def hit_rate(answered: Sequence[Account]) -> float:
    """Cached prompt tokens over prompt tokens; 0 of no answer."""
    prompt_tokens = sum(account.prompt_tokens for account in answered)
    return sum(account.cached_tokens for account in answered) / max(prompt_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds are counted from the beginning of the fault."""

    before: float
    lowest: float
    last: float
    """Of the latest window."""
    low_until_s: float
    """The end of the last window that was below `BACK` of `before`; 0 if none was."""
    is_back: bool


def recovery(accounts: Sequence[Account], *, before: float, began_at: float, healed_at: float) -> Recovery:
    """Of what was asked after `began_at`. It is back once a whole window that was asked after `healed_at` is good."""
    answered = sorted(
        (account for account in accounts if account.outcome is Outcome.RIGHT and account.asked_at >= began_at),
        key=lambda account: account.ended_at,
    )
    lowest, last, low_until_s = before, before, 0.0
    for window in _windows(answered):
        last = hit_rate(window)
        lowest = min(lowest, last)
        if last < BACK * before:
            low_until_s = window[-1].ended_at - began_at
    since = [account for account in answered if account.asked_at >= healed_at][-WINDOW:]
    return Recovery(
        before=before,
        lowest=lowest,
        last=last,
        low_until_s=low_until_s,
        is_back=len(since) == WINDOW and hit_rate(since) >= BACK * before,
    )


def _windows(answered: Sequence[Account]) -> Iterator[Sequence[Account]]:
    for end in range(WINDOW, len(answered) + 1):
        yield answered[end - WINDOW : end]
