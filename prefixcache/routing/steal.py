"""Stealing: an idle worker takes over a request that waits for another one.

It loses what the other one has cached of the prompt, so it has to begin earlier by several times the prefill that this
costs. Hot prefixes spread to more workers by this alone, and cold prompts to whoever has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

STEAL_PRICE = 3.0
"""Seconds earlier that a second of extra prefill has to bring; by simulation: 1 is harmful, and so is not stealing."""
STEAL_OVERHEAD_S = 0.02
"""What moving a request costs in any case: two messages and the start of another prefill."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Generic[T]):
    """A request that its worker has not started and that the idle one may have; a sliced one has started."""

    request: T
    """What the caller knows it by."""
    ahead_s: float
    """Prefill seconds that its worker will do before it."""
    prefill_there_s: float
    """Its own prefill on that worker."""
    prefill_here_s: float
    """The same on the idle one."""

    def gain_s(self) -> float:
        """What moving it is worth; nothing or less: it stays."""
        extra_s = self.prefill_here_s - self.prefill_there_s
        return self.ahead_s - STEAL_PRICE * (extra_s + STEAL_OVERHEAD_S)


def to_steal(waiting: Iterable[Waiting[T]]) -> T | None:
    """The one that gains most; the first of equals, None where none gains anything."""
    best = max(waiting, key=Waiting.gain_s, default=None)
    return best.request if best is not None and best.gain_s() > 0.0 else None
