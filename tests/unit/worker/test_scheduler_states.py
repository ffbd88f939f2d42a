"""A state machine over scheduler and pool: arrivals, turns, aborts, faults, evictions, preemptions, slices, budgets.

The truth beside it is dumb. Each token's KV is the token and its position, block by block, and each draw is a hash of
all tokens read back. So a block that is reused wrongly, evicted while it is read or never computed shows in what is
drawn; and what the pool says of its blocks is held against what stands in them after every step.
"""

from __future__ import annotations

import math
from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixcache.routing import slices
from prefixcache.routing.order import Order
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner, expected_output
from worker.block_pool import Block, BlockPool
from worker.runner import Drawn
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.step_costs import ChunkCost, pairs
from worker.step_plan import PlannedShare, StepPlan

BLOCK = 4
STEP = 24
VOCABULARY = 1_000
COST = ChunkCost(token_s=0.001, pair_s=0.0001)
MOST_LIVE = 12
SLICE = 16
"""Tokens, so that several slices fit into little room."""


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler between two steps, and steps."""

    @initialize(
        num_blocks=st.sampled_from([6, 10, 24, 60]),
        max_running=st.integers(1, 8),
        order=st.sampled_from(["mean", "tail"]),
        step_s=st.sampled_from([math.inf, 0.012, 0.001]),
    )
    def begin(self, num_blocks: int, max_running: int, order: Order, step_s: float) -> None:
        self.usual_least_tokens = slices.LEAST_SLICE_TOKENS
        slices.LEAST_SLICE_TOKENS = SLICE
        self.now = 0.0
        self.step_s = step_s
        self.runner = ScriptedRunner(num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCABULARY)
        self.pool = BlockPool(num_blocks, stride=2, clock=lambda: self.now)
        self.scheduler = Scheduler(
            self.pool, block_size=BLOCK, order=order, step_tokens=STEP, step_s=step_s, max_running=max_running
        )
        self.most_tokens = num_blocks * BLOCK
        self.prompts: list[list[int]] = []
        """Of all requests so far, and what ended ones became."""
        self.num_added = self.num_fresh = 0

    def teardown(self) -> None:
        """Whatever is still there can be computed to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3_000):
            if not self.scheduler.has_work:
                break
            self.compute(fault=None)
            self.agrees()
        slices.LEAST_SLICE_TOKENS = self.usual_least_tokens
        assert not self.scheduler.has_work, f"{self.scheduler.live()} do not end"
        assert self.pool.num_in_use == 0
        assert self.scheduler.sliced_tokens == () and self.scheduler.waiting_tokens == 0

    # --- what happens -----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.scheduler.live()) < MOST_LIVE)
    @rule(data=st.data(), max_tokens=st.integers(1, 12), waited_s=st.sampled_from([0.0, 0.0, 3.0, 1_000.0]))
    def arrive(self, data: st.DataObject, max_tokens: int, waited_s: float) -> None:
        """Behind the beginning of one before it, or all of it, or alone."""
        room = max(self.most_tokens - max_tokens, 1)
        before = data.draw(st.sampled_from([[], *self.prompts[-6:]]))
        shared = before[: data.draw(st.integers(0, len(before)))]
        fresh = data.draw(st.one_of(st.integers(0, 9), st.integers(0, room)))
        prompt = (shared + self.fresh(max(fresh, 1) if not shared else fresh))[:room]
        self.prompts.append(prompt)
        request = generate(
            str(self.num_added), prompt, max_tokens=min(max_tokens, self.most_tokens - len(prompt)), waited_s=waited_s
        )
        self.num_added += 1
        self.scheduler.add(Sequence("owner", request, self.runner.limits, arrived_at=self.now))

    def fresh(self, count: int) -> list[int]:
        self.num_fresh += count
        return [number % VOCABULARY for number in range(self.num_fresh - count, self.num_fresh)]

    @precondition(lambda self: self.scheduler.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.scheduler.live())))

    @rule(count=st.integers(1, 60))
    def evict(self, count: int) -> None:
        """As if a request had needed that much room and failed."""
        taken = self.pool.allocate(min(count, self.pool.num_available))
        assert taken is not None
        self.pool.release(taken)

    @rule(seconds=st.sampled_from([0.1, 5.0, 300.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_work:
                self.compute(fault=None)
                self.agrees()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(fault=st.integers(0, 3))
    def step_with_a_fault(self, fault: int) -> None:
        self.compute(fault=fault)

    # --- a step, and what must be true of it ------------------------------------------------------------------

    def compute(self, *, fault: int | None) -> None:
        decodes = [sequence for sequence in self.scheduler.running if sequence.num_uncomputed_tokens == 1]
        findable, num_evictions = self.prefixes(), self.pool.num_evictions
        plan = self.scheduler.schedule(now=self.now, prefill_rate=SLICE / slices.SLICE_S, chunk_cost=COST)
        self.check_plan(plan, decodes)
        if self.pool.num_evictions == num_evictions:
            self.check_reuse(plan, findable)
        shares = [share.step_share() for share in plan.shares]
        self.runner.share_fault = lambda share: (
            RuntimeError("scripted") if fault is not None and share is shares[min(fault, len(shares) - 1)] else None
        )
        self.now += plan.work().chunk_tokens * COST.token_s
        for share, result in zip(plan.shares, self.runner.execute(shares), strict=True):
            self.settle(share, result)

    def settle(self, share: PlannedShare, result: Drawn | Exception | None) -> None:
        sequence = share.sequence
        if isinstance(result, Exception):
            self.scheduler.finish(sequence, failed=True)
            return
        assert (result is not None) == (share.num_tokens == sequence.num_uncomputed_tokens)
        self.scheduler.advance(share)
        if result is None:
            return
        sequence.first_token_at = self.now if sequence.first_token_at is None else sequence.first_token_at
        if sequence.append(result.token_id) is not None:
            output = list(sequence.tokens[sequence.num_prompt_tokens :])
            assert output == expected_output(sequence.prompt_ids, len(output), vocab_size=VOCABULARY)
            self.prompts.append([*sequence.tokens])
            self.scheduler.finish(sequence)

    def check_plan(self, plan: StepPlan, decodes: list[Sequence]) -> None:
        shares = {share.sequence: share.num_tokens for share in plan.shares}
        assert shares, "a step with work to do computes nothing"
        assert len(shares) == len(plan.shares), "a request has two shares"
        assert sum(shares.values()) <= STEP
        for sequence in decodes:
            assert sequence in plan.preempted or shares.get(sequence) == 1, "a decode waits for one chunk at most"
        chunks = {sequence: count for sequence, count in shares.items() if count > 1}
        for sequence, count in chunks.items():
            end = sequence.num_computed_tokens + count
            assert end == sequence.num_tokens or end % BLOCK == 0
        chunks_s = sum(COST.seconds(count, pairs(each.num_computed_tokens, count)) for each, count in chunks.items())
        if decodes and not (len(chunks) == 1 and max(chunks.values()) <= BLOCK):
            assert chunks_s <= self.step_s + 1e-9

    def check_reuse(self, plan: StepPlan, findable: set[tuple[int, ...]]) -> None:
        """What was there when a request was admitted is reused to the last block, and copied only from what was."""
        for sequence in plan.admitted:
            depth = 0
            while (
                depth < (sequence.num_tokens - 1) // BLOCK and tuple(sequence.tokens[: (depth + 1) * BLOCK]) in findable
            ):
                depth += 1
            reused = tuple(sequence.tokens[: sequence.num_computed_tokens])
            assert depth * BLOCK <= len(reused) < min((depth + 1) * BLOCK, sequence.num_tokens)
            assert (sequence.copied_block is not None) == (len(reused) > depth * BLOCK)
            assert not reused or any(prefix[: len(reused)] == reused for prefix in findable)

    def prefixes(self) -> set[tuple[int, ...]]:
        """The tokens up to the end of each findable block, full or not, as the blocks themselves say."""
        return {self.tokens_to(block) for block in self.findable()}

    def findable(self) -> list[Block]:
        return [block for block in self.pool._blocks if block.is_findable]

    def tokens_to(self, block: Block) -> tuple[int, ...]:
        before = () if block.parent is None else self.tokens_to(block.parent)
        return (*before, *array("I", block.token_ids))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        for block in self.findable():
            tokens = self.tokens_to(block)
            first = block.depth * BLOCK
            written = [(tokens[place], place) for place in range(first, len(tokens))]
            assert self.runner._memory[block.id][: len(written)] == written
        assert self.scheduler.prefill_tokens >= 0
        assert self.scheduler.waiting_tokens >= 0
        assert len(self.scheduler.running) + len(self.scheduler.waiting) == len(self.scheduler.live())


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=30, deadline=None)
