"""How fast the engine computes, learnt from its own steps.

The prefill rate is fitted to full chunks: 16-token tails hardly count (`prefixcache/routing/prefill_rate.py`). What
decodes in the same steps cost is part of it: a prefill waits for them, too.
"""

from __future__ import annotations

from prefixcache.routing.prefill_rate import PrefillRate
from worker.step_costs import ChunkCost, StepCosts, StepWork

FORGOTTEN_TOKENS = 16_384
"""32 full chunks: long enough to even out the noise of single steps, short enough to follow a neighbour's load."""
FORGOTTEN_DECODE_STEPS = 16
"""Weight of a decode step among those before it is 1 / this."""


class Pace:
    """Means over the latest steps. Belongs to the step thread."""

    def __init__(self, *, pair_rows: float) -> None:
        """`pair_rows`: what a query-key pair costs beside a row; RunnerLimits has it."""
        self._prefill_rate = PrefillRate(forgotten_tokens=FORGOTTEN_TOKENS)
        self._inter_token_latency_s: float | None = None
        self._costs = StepCosts(pair_rows=pair_rows)

    @property
    def prefill_rate(self) -> float:
        """Prefill tokens a second; 0 while none was measured."""
        return self._prefill_rate.tokens_per_s or 0.0

    @property
    def inter_token_latency_s(self) -> float:
        """Of steps with decodes, prefill chunks beside them included; 0 while there were none."""
        return self._inter_token_latency_s or 0.0

    @property
    def chunk_cost(self) -> ChunkCost:
        """What prefill chunks add to a step."""
        return self._costs.chunk_cost

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step has ended that did not fail as a whole."""
        if work.chunk_tokens:
            self._prefill_rate.observe(tokens=work.chunk_tokens, seconds=seconds)
        if work.num_decodes:
            before = self._inter_token_latency_s
            change = 0.0 if before is None else (seconds - before) / FORGOTTEN_DECODE_STEPS
            self._inter_token_latency_s = seconds if before is None else before + change
        self._costs.observe(work, seconds)

    def split(self, work: StepWork, seconds: float) -> tuple[float, float]:
        """Which part of a step its prefill chunks took, and which its decodes."""
        return self._costs.split(work, seconds)
