"""What prefill and decode cost in time: two ways to say it, each with an engine that plays it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from prefixcache.errors import ConfigError


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
class StepCosts:
    """Engine steps that decodes and one prefill's chunk share, as `worker --runner sim` has them: the same terms.

        step_ms                                                                      every step
      + prefill_us * T                                                               T tokens of the prefill's chunk
      + itl_ms + itl_per_sequence_ms * N + itl_per_1k_context_ms * C / 1000          if there are decodes: N of them,
                                                                                     with C tokens of context in total

    All of it is divided by `speed`. A step has `step_tokens` tokens: one for each decode, the rest is the chunk. What a
    request generates keeps its room in the cache until the end, and counts among the idle blocks after it.
    """

    prefill_us: float = 100.0
    step_ms: float = 1.0
    itl_ms: float = 10.0
    itl_per_sequence_ms: float = 0.1
    itl_per_1k_context_ms: float = 0.05
    speed: float = 1.0
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
        return self.step_tokens / self.step_s(self.step_tokens, 0, 0)

    def step_s(self, chunk_tokens: int, num_decodes: int, context_tokens: int) -> float:
        """Seconds that one step takes."""
        cost_ms = self.step_ms + self.prefill_us * chunk_tokens / 1e3
        if num_decodes:
            cost_ms += self.itl_ms + self.itl_per_sequence_ms * num_decodes
            cost_ms += self.itl_per_1k_context_ms * context_tokens / 1e3
        return cost_ms / 1e3 / self.speed


Costs = PrefillCosts | StepCosts


def _require_positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{what} is {value}; it must be a finite number above 0")


def _require_not_negative(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{what} is {value}; it must be a finite number, at least 0")
