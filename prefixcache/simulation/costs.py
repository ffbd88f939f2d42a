"""What prefill and decode cost in time: two ways to say it, each with an engine that plays it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from prefixcache.errors import ConfigError
from prefixcache.step_costs import StepTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCosts:
    """A prefill server with decode beside it, which neither slows it down nor keeps room in the cache.

    A prefill, or a slice of one, takes uncached tokens / prefill_rate + overhead_s; the answer lasts output tokens *
    inter_token_s after it.
    """

    prefill_rate: float
    """Tokens a second."""
    overhead_s: float = 0.020
    inter_token_s: float = 0.025

    def __post_init__(self) -> None:
        """Raises ConfigError for a cost that is none."""
        _require_positive("prefill rate", self.prefill_rate)
        _require_not_negative("overhead of a prefill", self.overhead_s)
        _require_not_negative("inter-token latency", self.inter_token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts(StepTerms):
    """Engine steps that decodes and one prefill's chunk share, as `worker --runner sim` has them.

    A step has `step_tokens` tokens: one for each decode, the rest is the chunk. What a request generates keeps its room
    in the cache until the end, and counts among the idle blocks after it.
    """

    step_tokens: int = 512

    def __post_init__(self) -> None:
        """Raises ConfigError for a cost that is none."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("speed", "step_tokens"):
                _require_positive(field.name, value)
            else:
                _require_not_negative(field.name, value)
        if not self.prefill_us and not self.step_ms:
            raise ConfigError("prefill_us and step_ms are both 0: prefills that take no time need no routing")

    @property
    def prefill_rate(self) -> float:
        """Tokens a second of full chunks without decodes beside them."""
        return self.step_tokens / self.cost_s(self.step_tokens, 0, 0)


Costs = PrefillCosts | StepCosts


def _require_positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{what} is {value}; it must be a finite number above 0")


def _require_not_negative(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{what} is {value}; it must be a finite number, at least 0")
