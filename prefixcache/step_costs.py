"""What a step of an engine costs in time, in terms that `worker --runner sim` and `prefixcache simulate` share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Every term is divided by `speed`; infinity for a step that takes no time.

        step_ms                                                                      every step
      + prefill_us * T                                                               T tokens of prefill chunks
      + itl_ms + itl_per_sequence_ms * N + itl_per_1k_context_ms * C / 1000          if there are decodes: N of them,
                                                                                     with C tokens of context in total

    The defaults are round numbers, of the order of a model of 8 billion parameters on one data-centre GPU.
    """

    prefill_us: float = 100.0
    step_ms: float = 1.0
    itl_ms: float = 10.0
    itl_per_sequence_ms: float = 0.1
    itl_per_1k_context_ms: float = 0.05
    speed: float = 1.0

    def cost_s(self, prefill_tokens: int, num_decodes: int, context_tokens: int) -> float:
        """Seconds that one step takes."""
        cost_ms = self.step_ms + self.prefill_us * prefill_tokens / 1e3
        if num_decodes:
            cost_ms += self.itl_ms + self.itl_per_sequence_ms * num_decodes
            cost_ms += self.itl_per_1k_context_ms * context_tokens / 1e3
        return cost_ms / 1e3 / self.speed
