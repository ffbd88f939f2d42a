"""What one step is to compute: the scheduler's decision, before the runner is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.runner import StepShare
from worker.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShare:
    """The next `num_tokens` tokens of a sequence; the last chunk of a prefill and every decode draw a token."""

    sequence: Sequence
    num_tokens: int

    def step_share(self) -> StepShare:
        """What the runner is told."""
        sequence = self.sequence
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + self.num_tokens
        return StepShare(
            token_ids=sequence.tokens[start:end],
            start=start,
            block_table=tuple(sequence.block_table),
            sample=sequence.sample_spec() if end == sequence.num_tokens else None,
        )


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What one step is to compute, and what changed on the way to that decision."""

    shares: list[PlannedShare] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    budget: int
    """Tokens that prefills may still take."""
    computing: set[int] = field(default_factory=set)
    """Hashes of the full blocks that this step's chunks compute."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of prefill chunks; a share of one token is a decode."""
        return sum(share.num_tokens for share in self.shares if share.num_tokens > 1)

    @property
    def num_decodes(self) -> int:
        return sum(share.num_tokens == 1 for share in self.shares)
