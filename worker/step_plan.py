"""What one step is to compute: the scheduler's decision, before the runner is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.runner import StepShare
from worker.sequence import Sequence
from worker.step_budget import StepBudget
from worker.step_costs import StepWork, pairs


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
            copied_block=sequence.copied_block,
        )


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What one step is to compute, and what changed on the way to that decision."""

    shares: list[PlannedShare] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    budget: StepBudget
    """What prefills may still take."""
    computing: set[int] = field(default_factory=set)
    """Hashes of the full blocks that this step's chunks compute."""

    def work(self) -> StepWork:
        """What it costs depends on this. Before it is computed: its sequences go on then."""
        chunk_tokens = num_decodes = context_tokens = 0
        chunk_pairs = 0.0
        for share in self.shares:
            start = share.sequence.num_computed_tokens
            if share.num_tokens == 1:
                num_decodes, context_tokens = num_decodes + 1, context_tokens + start + 1
            else:
                chunk_tokens += share.num_tokens
                chunk_pairs += pairs(start, share.num_tokens)
        return StepWork(
            chunk_tokens=chunk_tokens, chunk_pairs=chunk_pairs, num_decodes=num_decodes, context_tokens=context_tokens
        )
