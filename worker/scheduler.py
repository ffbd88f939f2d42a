"""Decides what each step computes: no clock, no thread, no tensor.

    waiting  ──admit (FIFO)──►  running  ──finish──►
        ▲                          │
        └──── front ── preempt ────┘  newest first, when a step finds no block

    one step:   | 1 | 1 | 1 |   chunk of A    | chunk of B |          at most `step_tokens` tokens
                 decodes       prefills, oldest first

A prefill looks for its next blocks in the pool before each chunk. If an earlier request of the same step is computing
the very block it needs, it sits this step out and takes the block in the next: two requests that share a prefix go
through it one chunk apart, and the second computes nothing of it. Should the first one end early, the second finds
nobody computing and goes on by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from prefixcache.limits import MAX_RUNNING_REQUESTS, MAX_STEP_TOKENS
from worker.block_pool import BlockPool
from worker.runner import StepShare
from worker.sequence import Sequence

MAX_OVERTAKEN = 16
"""Waiting requests that one step may look past because each needs blocks being computed in it."""


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
    computing: set[int] = field(default_factory=set)
    """Hashes of the full blocks that this step's chunks compute."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of prefill chunks; a share of one token is a decode."""
        return sum(share.num_tokens for share in self.shares if share.num_tokens > 1)

    @property
    def num_decodes(self) -> int:
        return sum(share.num_tokens == 1 for share in self.shares)


class Scheduler:
    """Owns the waiting queue, the running requests and their blocks."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        step_tokens: int = MAX_STEP_TOKENS,
        max_running: int = MAX_RUNNING_REQUESTS,
    ) -> None:
        if step_tokens < max_running + block_size:
            raise ValueError(f"{step_tokens} tokens a step leave no block of {block_size} beside {max_running} decodes")
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Oldest admission first."""
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._live: dict[tuple[Hashable, str], Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def prefill_tokens(self) -> int:
        """Tokens that the running requests have yet to compute before they decode."""
        uncomputed = (sequence.num_uncomputed_tokens for sequence in self.running)
        return sum(num_tokens for num_tokens in uncomputed if num_tokens > 1)

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
        """Puts a new request at the end of the waiting queue."""
        self._live[sequence.key] = sequence
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Removes a request wherever it is. Blocks registered so far stay findable, the others are free again."""
        del self._live[sequence.key]
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pool.release(sequence.block_table)
        sequence.forget_blocks()

    # --- deciding -------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step. Its blocks are allocated; nothing counts as computed until `advance`."""
        num_single = sum(sequence.num_uncomputed_tokens == 1 for sequence in self.running)
        plan = StepPlan(budget=self._step_tokens - num_single)
        place = 0
        while place < len(self.running):
            self._plan_running(plan, self.running[place])
            place += 1
        self._admit(plan)
        return plan

    def _plan_running(self, plan: StepPlan, sequence: Sequence) -> None:
        if sequence.num_uncomputed_tokens == 1:
            if self._ensure_blocks(plan, sequence, sequence.num_tokens):
                plan.shares.append(PlannedShare(sequence=sequence, num_tokens=1))
            return
        found = self._match(sequence)
        self.pool.hold(found)
        if found:
            sequence.reuse(found)
        self._plan_chunk(plan, sequence)

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """One chunk of a prefill whose match has been taken, unless it has to sit this step out."""
        num_tokens = self._chunk_tokens(plan, sequence, sequence.num_computed_tokens)
        if not num_tokens or not self._ensure_blocks(plan, sequence, sequence.num_computed_tokens + num_tokens):
            return
        end = sequence.num_computed_tokens + num_tokens
        for position in range(sequence.num_computed_tokens // self._block_size, end // self._block_size):
            plan.computing.add(sequence.block_hash(position))
        plan.budget -= num_tokens
        plan.shares.append(PlannedShare(sequence=sequence, num_tokens=num_tokens))

    def _chunk_tokens(self, plan: StepPlan, sequence: Sequence, start: int) -> int:
        """Tokens of a chunk from `start`, a block's first token; chunks but the last end with a block. 0 = not now."""
        position = start // self._block_size
        if position < sequence.num_reusable_blocks and sequence.block_hash(position) in plan.computing:
            return 0
        end = min(start + plan.budget, sequence.num_tokens)
        if end < sequence.num_tokens:
            end = end // self._block_size * self._block_size
        return end - start

    def _match(self, sequence: Sequence) -> list[int]:
        """Findable blocks that continue its table."""
        table, found = sequence.block_table, list[int]()
        parent_id = table[-1] if table else None
        for position in range(len(table), sequence.num_reusable_blocks):
            parent_id = self.pool.find(
                parent_id,
                value=sequence.block_hash(position),
                token_ids=sequence.block_content(position),
                root=sequence.root,
            )
            if parent_id is None:
                break
            found.append(parent_id)
        return found

    def _ensure_blocks(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the table cover `num_tokens` tokens, preempting the newest requests; False if that was itself."""
        missing = sequence.num_blocks_for(num_tokens) - len(sequence.block_table)
        while (taken := self.pool.allocate(max(missing, 0))) is None:
            newest = self.running[-1]
            self._preempt(newest)
            plan.preempted.append(newest)
            if newest is sequence:
                return False
        sequence.block_table += taken
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.block_table)
        sequence.forget_blocks()
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    # --- admission ------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan) -> None:
        """Starts waiting requests in order while tokens and blocks last; never at a running request's cost."""
        promised = sum(self._num_missing_blocks(sequence, len(sequence.block_table)) for sequence in self.running)
        overtaken: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_running and plan.budget > 0:
            sequence = self.waiting[0]
            found = self._match(sequence)
            start = len(found) * self._block_size
            needed = self._num_missing_blocks(sequence, len(found))
            if needed + promised > self.pool.num_available - self.pool.count_idle(found):
                break
            if not self._chunk_tokens(plan, sequence, start):
                if len(overtaken) == MAX_OVERTAKEN or plan.budget < self._block_size:
                    break
                overtaken.append(self.waiting.popleft())
                continue
            self.waiting.popleft()
            self.running.append(sequence)
            self.pool.hold(found)
            if found:
                sequence.reuse(found)
            plan.admitted.append(sequence)
            self._plan_chunk(plan, sequence)
            promised += self._num_missing_blocks(sequence, len(sequence.block_table))
        self.waiting.extendleft(reversed(overtaken))

    def _num_missing_blocks(self, sequence: Sequence, num_held: int) -> int:
        """Blocks that it still lacks to compute all its tokens and draw one more."""
        return max(sequence.num_blocks_for(sequence.num_tokens + 1) - num_held, 0)

    # --- after the step -------------------------------------------------------------------------------------

    def advance(self, share: PlannedShare) -> None:
        """The share's KV is there: counts it and makes its full blocks findable."""
        sequence = share.sequence
        sequence.computed(share.num_tokens)
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
        self.pool.check_integrity(self._tables())

    def _tables(self) -> Iterable[list[int]]:
        return [sequence.block_table for sequence in self._live.values()]
