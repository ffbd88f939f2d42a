"""Every response under exactly one name; some of the names are failures of the product."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """What became of one request."""

    RIGHT = "answered right"
    COME_AGAIN = "told to come again (429, 503)"
    TOLD = "right so far, then an error event"
    REFUSED = "refused by name"
    LEFT = "left by its client, right so far"
    KILLED = "cut as its proxy was killed"
    NOT_TAKEN = "taken by no proxy"

    WRONG = "WRONG"
    CUT = "CUT"
    LOST = "LOST"
    BAD_STATUS = "STATUS NOT ALLOWED"

    @property
    def is_failure(self) -> bool:
        return self in (Outcome.WRONG, Outcome.CUT, Outcome.LOST, Outcome.BAD_STATUS, Outcome.NOT_TAKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    outcome: Outcome
    why: str = ""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts by kind of request."""

    counts: defaultdict[str, Counter[Outcome]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: Counter[str] = field(default_factory=Counter)
    """Of those that were not simply answered."""
    asked_again: Counter[str] = field(default_factory=Counter)
    """Why a client asked the next proxy, as a balancer does before the first byte."""
    failures: list[str] = field(default_factory=list)
    longest_gaps: list[tuple[float, float]] = field(default_factory=list)
    """Of each stream that was answered: seconds, and when they began."""

    def add(self, kind: str, verdict: Verdict) -> None:
        self.counts[kind][verdict.outcome] += 1
        if verdict.outcome.is_failure:
            self.failures.append(f"{kind}: {verdict.outcome}: {verdict.why}")
        elif verdict.outcome is not Outcome.RIGHT and verdict.why:
            self.reasons[f"{verdict.outcome}: {verdict.why}"] += 1

    @property
    def total(self) -> int:
        return sum(counter.total() for counter in self.counts.values())

    def share(self, outcome: Outcome, kinds: Sequence[str]) -> float:
        """Among the requests of these kinds."""
        asked = sum(self.counts[kind].total() for kind in kinds)
        return sum(self.counts[kind][outcome] for kind in kinds) / max(asked, 1)

    def rows(self) -> list[Mapping[str, object]]:
        """One for each kind and one for all; columns that are empty everywhere are left out."""
        seen = [outcome for outcome in Outcome if any(counter[outcome] for counter in self.counts.values())]
        total: Counter[Outcome] = sum(self.counts.values(), Counter())
        return [
            {"request": kind, "all": counter.total(), **{str(outcome): counter[outcome] for outcome in seen}}
            for kind, counter in [*sorted(self.counts.items()), ("all", total)]
        ]
