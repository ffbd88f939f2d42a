"""What the engine has in hand at one moment, and what of it goes into the worker's load record.

step thread ── Workload, a value, before and after each step ──► any thread: record(now) counts it down to `now`

rest of a prefill step   what is computed before the order chooses again, these chunks included, at the measured rate
rest of a decode step    at most one inter-token latency: so long a new prefill waits at least
sliced                   what is left of each sliced prefill after its running slice: others may go before it
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.limits import DEFAULT_PREFILL_RATE
from prefixcache.load import WorkerLoad, by_class


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Times are those of the engine's clock."""

    prefill_rate: float = 0.0
    inter_token_latency_s: float = 0.0
    prefill_tokens: int = 0
    """To be computed before the order chooses again; the chunks of the present step count until it ends."""
    chunk_tokens: int = 0
    """Of them those in the present step."""
    step_began_at: float | None = None
    """None between two steps, and while there is nothing to do."""
    sliced_tokens: tuple[int, ...] = ()
    """Left of each sliced prefill after its running slice."""
    waiting_tokens: int = 0
    """To be computed for the requests that wait."""
    available_blocks: int
    free_blocks: int
    """Those of them that hold nothing."""
    evicted_next_used_at: float | None = None
    """Last use of the block that is evicted next; None where none can be evicted."""

    def rest_s(self, now: float) -> float:
        """Seconds until the order chooses again, and a further prefill can begin."""
        elapsed_s = 0.0 if self.step_began_at is None else now - self.step_began_at
        if not self.prefill_tokens:
            return 0.0 if self.step_began_at is None else max(self.inter_token_latency_s - elapsed_s, 0.0)
        if not self.prefill_rate:
            return 0.0
        chunk_s = self.chunk_tokens / self.prefill_rate
        return self.prefill_tokens / self.prefill_rate - min(elapsed_s, chunk_s)

    def ahead_s(self, now: float) -> float:
        """Seconds until all that is there now is prefilled; a rate that was not measured is taken for the usual one."""
        rate = self.prefill_rate or DEFAULT_PREFILL_RATE
        return self.rest_s(now) + (sum(self.sliced_tokens) + self.waiting_tokens) / rate

    def record(self, now: float) -> WorkerLoad:
        """The load at `now`; its version and whether the worker drains is not the engine's to say."""
        used_at = self.evicted_next_used_at
        return WorkerLoad(
            rest_s=self.rest_s(now),
            sliced_s=by_class(num_tokens / self.prefill_rate for num_tokens in self.sliced_tokens if self.prefill_rate),
            prefill_rate=self.prefill_rate,
            inter_token_latency_s=self.inter_token_latency_s,
            available_blocks=self.available_blocks,
            free_blocks=self.free_blocks,
            oldest_age_s=0.0 if used_at is None else max(now - used_at, 0.0),
        )
