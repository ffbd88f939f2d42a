"""Decides what each step computes: no clock, no thread, no tensor.

    waiting  ──admit (in order)──►  running  ──finish──►
      ▲   ▲                           │   │
      │   └──── first ─── preempt ────┘   │  newest first, when a step finds no block
      └──── in order ─── slice is over ───┘

    one step:   | 1 | 1 | 1 |   chunk of A    | chunk of B |          at most `step_tokens` tokens; where decodes wait
                 decodes       prefills begun, oldest first,          for the chunks, these take at most `step_s`
                               then what the order chooses            (step_budget.py)

A prefill that has begun goes on until it has its first token, so that prompts are computed one after the other. A long
one is cut into slices (prefixcache/routing/slices.py): after each the order chooses between its rest and what waits. If
something else goes first, it gives its blocks back and waits as well. Nothing is promised to it, and little is lost: it
was used last, so other blocks are evicted first, and it begins again behind those that are left. As long as a sliced
prefill is there, running or waiting, only what may pass it is admitted.

    A  | chunk | chunk ◄── slice used up: waits again ................. chosen again ── chunk | chunk | ...
    B                  | chunk | chunk ◄── waits again | chunk |        at most half of A, its key is the lesser one
    C                                  | chunk |                        short

A prefill looks for its next blocks in the pool before each chunk. If an earlier request of the same step is computing
the very block it needs, it sits this step out and takes the block in the next: two requests that share a prefix go
through it one chunk apart, and the second computes nothing of it. Should the first one end early, the second finds
nobody computing and goes on by itself.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import replace

from prefixcache.errors import IntegrityError
from prefixcache.limits import MAX_RUNNING_REQUESTS, MAX_STEP_S, MAX_STEP_TOKENS
from prefixcache.routing.order import Order
from prefixcache.routing.slices import is_to_be_sliced, may_pass, slice_tokens
from worker.block_pool import BlockPool
from worker.reuse import Reusable, find_blocks, find_reusable
from worker.sequence import Sequence
from worker.step_budget import StepBudget
from worker.step_costs import ChunkCost
from worker.step_plan import PlannedShare, StepPlan
from worker.waiting_queue import Candidate, WaitingQueue


class Scheduler:
    """Owns the waiting queue, the running requests and their blocks."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        order: Order = "mean",
        step_tokens: int = MAX_STEP_TOKENS,
        step_s: float = MAX_STEP_S,
        max_running: int = MAX_RUNNING_REQUESTS,
    ) -> None:
        if step_tokens < max_running + block_size:
            raise ValueError(f"{step_tokens} tokens a step leave no block of {block_size} beside {max_running} decodes")
        self.pool = pool
        self.waiting = WaitingQueue(pool, block_size=block_size, order=order)
        self.running: list[Sequence] = []
        """Oldest admission first."""
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._step_s = step_s
        self._max_running = max_running
        self._live: dict[tuple[Hashable, str], Sequence] = {}
        self._sliced: dict[Sequence, int] = {}
        """Running prefills that are cut, and what each may still compute of its slice."""

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_prefilling(self) -> int:
        """Running requests without a first token."""
        return sum(sequence.first_token_at is None for sequence in self.running)

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute before the order chooses again: of the running prefills without what is left of a slice."""
        uncomputed = (sequence.num_uncomputed_tokens for sequence in self.running)
        return sum(num_tokens for num_tokens in uncomputed if num_tokens > 1) - sum(self._tokens_after_slices())

    @property
    def sliced_tokens(self) -> tuple[int, ...]:
        """What each sliced prefill has to compute after its running slice, or where it waits for the next one."""
        return (*self._tokens_after_slices(), *self.waiting.cut_tokens)

    def _tokens_after_slices(self) -> list[int]:
        """Of the running ones."""
        return [
            max(sequence.num_uncomputed_tokens - max(num_slice_tokens, 0), 0)
            for sequence, num_slice_tokens in self._sliced.items()
        ]

    @property
    def waiting_tokens(self) -> int:
        """What those that wait have to compute, without sliced ones."""
        return self.waiting.num_uncached_tokens - sum(self.waiting.cut_tokens)

    def of_owner(self, owner: Hashable, request_id: str | None) -> list[Sequence]:
        """The live request of that name, or all of the owner's; none where it has ended."""
        if request_id is None:
            return [sequence for sequence in self._live.values() if sequence.owner == owner]
        sequence = self._live.get((owner, request_id))
        return [] if sequence is None else [sequence]

    def live(self) -> list[Sequence]:
        """Every request that has not ended, waiting or running."""
        return list(self._live.values())

    def add(self, sequence: Sequence) -> None:
        """A new request, which waits."""
        self._live[sequence.key] = sequence
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Removes a request wherever it is. What is computed of it stays findable, the other blocks are free again.

        `failed`: in its step, so that nothing but its registered blocks can be trusted.
        """
        del self._live[sequence.key]
        if sequence in self.running:
            self._leave(sequence, failed=failed)
        else:
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Takes it out of the running ones, its blocks from it."""
        self.running.remove(sequence)
        self._end_slices(sequence, True)
        if not failed:
            self._keep_begun(sequence)
        self.pool.release(sequence.block_table)
        sequence.forget_blocks()

    def _keep_begun(self, sequence: Sequence) -> None:
        """The block that is not full, if something of it is computed."""
        place, num_tokens = divmod(sequence.num_computed_tokens, self._block_size)
        if num_tokens and place == sequence.num_registered_blocks:
            content = sequence.content_after(place, sequence.num_computed_tokens)
            self.pool.keep(sequence.block_table, place, token_ids=content, root=sequence.root)

    # --- deciding -------------------------------------------------------------------------------------------

    def schedule(self, *, now: float, prefill_rate: float | None, chunk_cost: ChunkCost) -> StepPlan:
        """The next step. Its blocks are allocated; nothing counts as computed until `advance`.

        `now` is on the clock by which requests arrive; `prefill_rate` in tokens a second, None while none was measured.
        """
        num_single = sum(sequence.num_uncomputed_tokens == 1 for sequence in self.running)
        plan = StepPlan(
            budget=StepBudget(
                num_tokens=self._step_tokens - num_single,
                least_tokens=self._block_size,
                cost=chunk_cost,
                seconds=self._step_s if num_single else math.inf,
            )
        )
        place = 0
        while place < len(self.running):
            if not self._is_slice_over(self.running[place]):
                self._plan_running(plan, self.running[place])
            place += 1
        self._choose(plan, now=now, prefill_rate=prefill_rate)
        copied = [sequence.copied_block for sequence in plan.admitted if sequence.copied_block is not None]
        self.pool.release(copied)  # Until the step copies from them nothing is allocated.
        return plan

    def _is_slice_over(self, sequence: Sequence) -> bool:
        return self._sliced.get(sequence, 1) <= 0

    def _plan_running(self, plan: StepPlan, sequence: Sequence) -> None:
        if sequence.num_uncomputed_tokens == 1:
            if self._ensure_blocks(plan, sequence, sequence.num_tokens):
                plan.shares.append(PlannedShare(sequence=sequence, num_tokens=1))
            return
        self._take_found(sequence)
        num_tokens = self._chunk_tokens(plan, sequence, sequence.num_computed_tokens)
        if num_tokens and self._ensure_blocks(plan, sequence, sequence.num_computed_tokens + num_tokens):
            self._plan_chunk(plan, sequence, num_tokens)

    def _take_found(self, sequence: Sequence) -> None:
        found = find_blocks(self.pool, sequence)
        self.pool.hold(found)
        if found:
            sequence.reuse(found)
        self._end_slices(sequence, sequence.num_uncomputed_tokens <= 1)

    def _end_slices(self, sequence: Sequence, is_over: bool) -> None:
        """It is not cut any more if its prefill is over, planned to its end or given up."""
        if is_over:
            self._sliced.pop(sequence, None)

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        """The next tokens of a prefill whose table covers them."""
        start = sequence.num_computed_tokens
        end = start + num_tokens
        for position in range(start // self._block_size, end // self._block_size):
            plan.computing.add(sequence.block_hash(position))
        plan.budget.take(start, num_tokens)
        plan.shares.append(PlannedShare(sequence=sequence, num_tokens=num_tokens))
        self._end_slices(sequence, end == sequence.num_tokens)

    def _chunk_tokens(self, plan: StepPlan, sequence: Sequence, start: int) -> int:
        """Tokens of a chunk from `start`; chunks but the last end with a block. 0 = not now."""
        if self._sits_out(plan, sequence, start // self._block_size):
            return 0
        end = min(start + plan.budget.num_tokens_from(start), sequence.num_tokens)
        if end < sequence.num_tokens:
            end = end // self._block_size * self._block_size
        return max(end - start, 0)

    def _sits_out(self, plan: StepPlan, sequence: Sequence, position: int) -> bool:
        """Whether the block that it needs next is being computed in this step."""
        return position < sequence.num_reusable_blocks and sequence.block_hash(position) in plan.computing

    def _ensure_blocks(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the table cover `num_tokens` tokens, preempting the newest requests; False if that was itself."""
        while not self._take_blocks(sequence, num_tokens):
            newest = self.running[-1]
            self._preempt(newest)
            plan.preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def _take_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the table cover `num_tokens` tokens; False if there are too few blocks."""
        missing = sequence.num_blocks_for(num_tokens) - len(sequence.block_table)
        taken = self.pool.allocate(max(missing, 0))
        if taken is None:
            return False
        sequence.block_table += taken
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.num_preemptions += 1
        self.waiting.put_back(sequence)

    # --- choosing -------------------------------------------------------------------------------------------

    def _choose(self, plan: StepPlan, *, now: float, prefill_rate: float | None) -> None:
        """Gives what is left of the budget to those that wait and to those whose slice is over, in order."""
        if plan.budget.is_spent:
            self.waiting.go_on_walking()
            return
        num_slice_tokens = slice_tokens(prefill_rate)
        for sequence in [sequence for sequence in self._sliced if self._is_slice_over(sequence)]:
            self._take_found(sequence)
            if sequence not in self._sliced:
                continue  # others have computed all but its last token meanwhile: the next step takes it for a decode
            candidates = self.waiting.in_order(now=now, prefill_rate=prefill_rate)
            key = self.waiting.key(sequence, sequence.num_uncomputed_tokens, now=now, prefill_rate=prefill_rate)
            left_tokens = self._least_left_tokens()
            is_passed = any(
                candidate.key < key
                and (candidate.has_begun or may_pass(candidate.num_uncached_tokens, num_slice_tokens, left_tokens))
                for candidate in candidates
            )
            if is_passed or not self._begin_slice(plan, sequence, num_slice_tokens):
                self._give_back(sequence)
        if len(self.running) == self._max_running:
            self.waiting.go_on_walking()
        elif len(self.waiting):
            self._admit(plan, self.waiting.in_order(now=now, prefill_rate=prefill_rate), num_slice_tokens)

    def _begin_slice(self, plan: StepPlan, sequence: Sequence, num_slice_tokens: int) -> bool:
        """Goes on at once with the next slice, or all of the rest; False without blocks for it: nobody is preempted.

        Where the step has no room for its next block, or computes that block for another, it stands as it is.
        """
        num_uncomputed = sequence.num_uncomputed_tokens
        num_tokens = self._chunk_tokens(plan, sequence, sequence.num_computed_tokens)
        if not num_tokens:
            return True
        if not self._take_blocks(sequence, sequence.num_computed_tokens + num_tokens):
            return False
        is_cut = self._is_to_be_sliced(sequence, num_uncomputed, num_slice_tokens)
        self._sliced[sequence] = num_slice_tokens if is_cut else num_uncomputed
        self._plan_chunk(plan, sequence, num_tokens)
        return True

    def _give_back(self, sequence: Sequence) -> None:
        """It waits for its next slice without blocks."""
        num_blocks = sequence.num_registered_blocks
        self._leave(sequence)
        self.waiting.put_back_cut(sequence, num_blocks)

    def _least_left_tokens(self) -> int | None:
        """Of what the sliced prefills still need, running or not; None without any."""
        running = (sequence.num_uncomputed_tokens for sequence in self._sliced)
        return min((*running, *self.waiting.cut_tokens), default=None)

    def _admit(self, plan: StepPlan, candidates: Iterable[Candidate], num_slice_tokens: int) -> None:
        """Starts candidates in order while tokens and blocks last; never at a running request's cost.

        Nobody passes one that finds too few blocks. One that the step has no room for is passed only by what ends with
        this step, lest short ones that go on in the next leave it without room there, too.
        """
        promised = sum(self._num_missing_blocks(sequence, len(sequence.block_table)) for sequence in self.running)
        left_tokens = self._least_left_tokens()
        is_passing = False
        for candidate in candidates:
            sequence = candidate.sequence
            if plan.budget.is_spent or len(self.running) == self._max_running:
                return
            if not candidate.has_begun:
                if not may_pass(candidate.num_uncached_tokens, num_slice_tokens, left_tokens):
                    continue
            if self._sits_out(plan, sequence, candidate.num_found_blocks):
                continue
            room_tokens = plan.budget.num_tokens_from(candidate.num_found_blocks * self._block_size)
            if room_tokens < candidate.num_uncached_tokens and (is_passing or room_tokens < self._block_size):
                is_passing = True
                continue
            if self._num_missing_blocks(sequence, candidate.num_found_blocks) + promised > self.pool.num_available:
                return
            found = find_reusable(self.pool, sequence)
            missing = self._num_missing_blocks(sequence, len(found.blocks))
            num_spare = self.pool.num_available - missing - promised
            if num_spare < self.pool.count_idle(found.blocks):
                return
            if found.copied is not None and num_spare < self.pool.count_idle([*found.blocks, found.copied[0]]):
                found = replace(found, copied=None)  # Its room is needed.
            start = len(found.blocks) * self._block_size + found.num_copied_tokens
            num_tokens = self._chunk_tokens(plan, sequence, start)
            if not num_tokens:
                continue
            self._start(plan, sequence, found, num_tokens, num_slice_tokens)
            promised += self._num_missing_blocks(sequence, len(sequence.block_table))

    def _start(
        self, plan: StepPlan, sequence: Sequence, found: Reusable, num_tokens: int, num_slice_tokens: int
    ) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        plan.admitted.append(sequence)
        self.pool.hold(found.blocks)
        if found.copied is not None:
            self.pool.hold(found.copied[:1])
        sequence.reuse(found.blocks, copied=found.copied)
        if self._is_to_be_sliced(sequence, sequence.num_uncomputed_tokens, num_slice_tokens):
            self._sliced[sequence] = num_slice_tokens
        has_blocks = self._take_blocks(sequence, sequence.num_computed_tokens + num_tokens)
        assert has_blocks, "admitted without the blocks of its first chunk"
        self._plan_chunk(plan, sequence, num_tokens)

    def _is_to_be_sliced(self, sequence: Sequence, num_uncomputed_tokens: int, num_slice_tokens: int) -> bool:
        """One that had begun to answer and lost its blocks is not cut: a client waits in the middle of a text."""
        return sequence.first_token_at is None and is_to_be_sliced(
            num_uncomputed_tokens,
            num_slice_tokens,
            prompt_tokens=sequence.num_tokens,
            capacity_tokens=self.pool.num_blocks * self._block_size,
            computed_tokens=sequence.prefilled_tokens,
        )

    def _num_missing_blocks(self, sequence: Sequence, num_held: int) -> int:
        """Blocks that it still lacks to compute all its tokens and draw one more."""
        return max(sequence.num_blocks_for(sequence.num_tokens + 1) - num_held, 0)

    # --- after the step -------------------------------------------------------------------------------------

    def advance(self, share: PlannedShare) -> None:
        """The share's KV is there: counts it and makes its full blocks findable."""
        sequence = share.sequence
        sequence.computed(share.num_tokens)
        if sequence in self._sliced:
            self._sliced[sequence] -= share.num_tokens
            self._end_slices(sequence, sequence.num_uncomputed_tokens <= 1)
        for position in range(sequence.num_registered_blocks, sequence.num_computed_tokens // self._block_size):
            if not self.pool.register(
                sequence.block_table,
                position,
                value=sequence.block_hash(position),
                token_ids=sequence.block_content(position),
                root=sequence.root,
            ):
                break
            sequence.num_registered_blocks = position + 1

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pool, tables and queues agree. For tests: it reads everything."""
        self.pool.check_integrity(sequence.block_table for sequence in self._live.values())
        waiting, running = set(self.waiting), set(self.running)
        if waiting & running or waiting | running != set(self._live.values()):
            raise IntegrityError(f"{len(waiting)} wait and {len(running)} run, {len(self._live)} live")
        if any(sequence.block_table for sequence in waiting):
            raise IntegrityError("a request that waits holds blocks")
        for sequence in self._sliced:
            if sequence not in running or sequence.num_uncomputed_tokens <= 1:
                raise IntegrityError(f"the sliced request {sequence.id} is not being prefilled")
