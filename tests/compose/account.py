"""What became of one request, under exactly one name, and what of it may be while a part is away. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from tests.support.sim_oracle import ExpectedAnswer


class Outcome(StrEnum):
    """As the client's program sees it, after the client's own retries."""

    RIGHT = "right"
    CUT = "cut"
    """After its first token, with an error that the program cannot miss; right so far."""
    TOLD = "error event"
    """Likewise."""
    FAILED = "FAILED"
    """Before its first token."""
    UNFINISHED = "AS IF WHOLE"
    WRONG = "WRONG"


@dataclass(slots=True, kw_only=True)
class Seen:
    """As much of an answer as came."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """None without usage."""
    completion_tokens: int | None = None
    cached_tokens: int = 0
    has_begun: bool = False
    """The head of a stream, which is sent with the first token, has come: the client asks no more by itself."""
    worker: str = ""
    """The name of the one that the answer's head tells."""
    arrivals: list[float] = field(default_factory=list)
    """Of each piece of text, by time.monotonic()."""

    def differs(self, expected: ExpectedAnswer) -> str | None:
        """What is wrong with it as a whole answer."""
        mine = (self.text, self.finish_reason, self.prompt_tokens, self.completion_tokens)
        true = (expected.text, expected.finish_reason, expected.prompt_tokens, expected.completion_tokens)
        if mine != true:
            return f"{mine} in place of {true}"
        if not 0 <= self.cached_tokens <= expected.prompt_tokens:
            return f"{self.cached_tokens} cached of {expected.prompt_tokens} prompt tokens"
        return None

    @property
    def longest_gap_s(self) -> float:
        """Between two pieces."""
        return max((later - earlier for earlier, later in pairwise(self.arrivals)), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one request; all times by time.monotonic()."""

    is_stream: bool
    asked_at: float
    ended_at: float
    outcome: Outcome
    why: str = ""
    failed_attempts: Sequence[str] = ()
    """Why the client asked again by itself, each time."""
    first_token_s: float = 0.0
    """From the request on; of an answer that is no stream, until all of it was there."""
    longest_gap_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""


def account_of(
    seen: Seen,
    expected: ExpectedAnswer,
    *,
    is_stream: bool,
    asked_at: float,
    ended_at: float,
    error: str | None = None,
    was_told: bool = False,
    failed_attempts: Sequence[str] = (),
) -> Account:
    """`error`: what the client raised, `was_told`: for an error event; neither after an end that looked whole."""
    outcome, why = _judged(seen, expected, error, was_told=was_told)
    return Account(
        is_stream=is_stream,
        asked_at=asked_at,
        ended_at=ended_at,
        outcome=outcome,
        why=why,
        failed_attempts=tuple(failed_attempts),
        first_token_s=(seen.arrivals[0] if seen.arrivals else ended_at) - asked_at,
        longest_gap_s=seen.longest_gap_s,
        prompt_tokens=seen.prompt_tokens or 0,
        cached_tokens=seen.cached_tokens,
        worker=seen.worker,
    )


def _judged(seen: Seen, expected: ExpectedAnswer, error: str | None, *, was_told: bool) -> tuple[Outcome, str]:
    if not expected.text.startswith(seen.text):
        return Outcome.WRONG, f"{seen.text!r} is no beginning of {expected.text!r}"
    if error is not None:
        if not seen.has_begun:
            return Outcome.FAILED, error
        return (Outcome.TOLD if was_told else Outcome.CUT), error
    if seen.finish_reason is None or seen.prompt_tokens is None:
        return Outcome.UNFINISHED, f"{len(seen.text)} of {len(expected.text)} characters, {seen.finish_reason}"
    if (wrong := seen.differs(expected)) is not None:
        return Outcome.WRONG, wrong
    return Outcome.RIGHT, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What clients may see of one fault; a wrong answer, or half of one as if it were whole, never."""

    outcomes: Collection[Outcome] = (Outcome.RIGHT,)
    retries: bool = False
    """Whether a client may have to ask again by itself before the first token."""

    def broken_by(self, accounts: Sequence[Account]) -> list[str]:
        """Every request that saw more, in words."""
        return [
            f"{account.outcome}: {account.why}; asked again after {list(account.failed_attempts)}"
            for account in accounts
            if account.outcome not in self.outcomes or (account.failed_attempts and not self.retries)
        ]


NOTHING = Allowance()
"""Of every part but a proxy, and of an orderly end of any."""
STREAMS = Allowance(outcomes=(Outcome.RIGHT, Outcome.CUT), retries=True)
"""Of a proxy that dies, and of an edge that stands still: what is in its hands is cut, and never ended as if it were
whole."""
DOOR = Allowance(outcomes=(Outcome.RIGHT, Outcome.FAILED), retries=True)
"""Of an orderly restart of the edge, or of the only proxy: the door is shut for about as long as a client has patience,
and not one answer that has begun is lost."""
NO_DOOR = Allowance(outcomes=(Outcome.RIGHT, Outcome.CUT, Outcome.FAILED), retries=True)
"""Of an edge that dies: the next one stands after 0.7 to 0.9 s on two quiet cores, and a client asks for the last time
after 1.1 to 1.5 s (measured: on busy ones 2 of 147 requests failed)."""
