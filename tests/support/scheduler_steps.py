"""A scheduler whose steps always succeed and take the time of their tokens; its integrity is checked after each."""

from __future__ import annotations

import math
from collections.abc import Sequence as Ids

from prefixcache.routing.order import Order
from tests.support.requests import generate
from worker.block_pool import BlockPool
from worker.runner import RunnerLimits
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.step_costs import ChunkCost
from worker.step_plan import StepPlan

TOKEN = 99
"""What every step draws."""


class Steps:
    """Time is `now`; a step takes `1 / rate` a token and `pair_s` a query-key pair of chunks; the scheduler is told."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        step_tokens: int = 16,
        max_running: int = 8,
        order: Order = "mean",
        rate: float = 1_000.0,
        step_s: float = math.inf,
        pair_s: float = 0.0,
        checks_integrity: bool = True,
    ) -> None:
        self.now = 0.0
        self.chunks_s = 0.0
        """What the chunks of the last step took."""
        self.rate = rate
        self._checks_integrity = checks_integrity
        self.pool = BlockPool(num_blocks, stride=1, clock=lambda: self.now)
        self.scheduler = Scheduler(
            self.pool,
            block_size=block_size,
            order=order,
            step_tokens=step_tokens,
            step_s=step_s,
            max_running=max_running,
        )
        self.cost = ChunkCost(token_s=1 / rate, pair_s=pair_s)
        self.ended: list[Sequence] = []
        self._limits = RunnerLimits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=num_blocks * block_size,
            vocab_size=1_000_000,
            kv_bytes_per_token=1,
        )

    def add(self, name: str, prompt: Ids[int], *, max_tokens: int = 9, waited_s: float = 0.0) -> Sequence:
        request = generate(name, prompt, max_tokens=max_tokens, waited_s=waited_s)
        sequence = Sequence("owner", request, self._limits, arrived_at=self.now)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """One step; the tokens that each request got in it."""
        plan = self.scheduler.schedule(now=self.now, prefill_rate=self.rate, chunk_cost=self.cost)
        work = plan.work()
        shares = self.shares(plan)
        assert len(shares) == len(plan.shares), f"a request has two shares: {plan.shares}"
        for sequence in plan.admitted:
            sequence.started_at = self.now if sequence.started_at is None else sequence.started_at
        self.chunks_s = self.cost.seconds(work.chunk_tokens, work.chunk_pairs)
        self.now += self.chunks_s + work.num_decodes / self.rate
        for share in plan.shares:
            sequence, draws = share.sequence, share.step_share().sample is not None
            self.scheduler.advance(share)
            if not draws:
                continue
            sequence.first_token_at = self.now if sequence.first_token_at is None else sequence.first_token_at
            if sequence.append(TOKEN) is not None:
                self.scheduler.finish(sequence)
                self.ended.append(sequence)
        if self._checks_integrity:
            self.scheduler.check_integrity()
        return shares

    def run(self, most_steps: int = 10_000) -> list[dict[str, int]]:
        """Steps until nothing is left to do."""
        taken: list[dict[str, int]] = []
        while self.scheduler.has_work:
            assert len(taken) < most_steps, f"{self.scheduler.live()} do not end"
            taken.append(self.step())
        return taken

    @staticmethod
    def shares(plan: StepPlan) -> dict[str, int]:
        return {share.sequence.id: share.num_tokens for share in plan.shares}


def numbers(first: int, count: int) -> list[int]:
    """A prompt of `count` ids that shares nothing with one from another range."""
    return list(range(first, first + count))
