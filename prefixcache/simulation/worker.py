"""A simulated worker: a cache, an engine, what waits for it, and what proxies are told of it.

waiting ──order──► piece of prefill ──┬─ a slice: again, by the same order, and what may pass goes between
                                      └─ the last one: first token ──► decode ──► ended
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prefixcache.limits import DEFAULT_PREFILL_RATE
from prefixcache.load import waiting_class
from prefixcache.routing.base import HitSource, WorkerSnapshot
from prefixcache.routing.order import Order, order_key
from prefixcache.routing.prefill_rate import PrefillRate
from prefixcache.routing.slices import SLICE_S, is_to_be_sliced, may_pass, slice_tokens
from prefixcache.simulation.claims import Claims
from prefixcache.simulation.costs import PrefillCosts
from prefixcache.simulation.engine import NEVER, Engine
from prefixcache.simulation.job import Job
from prefixcache.simulation.ledger import Ledger, Placed
from prefixcache.simulation.lru import LruCache
from prefixcache.simulation.mechanisms import Mechanisms
from prefixcache.simulation.prefill_server import PrefillServer
from prefixcache.simulation.scenario import Scenario
from prefixcache.simulation.step_engine import StepEngine

FORGOTTEN_TOKENS = 16_384
"""Of the learnt prefill rate, as a worker's own."""
_MICRO = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a worker and the proxies said last of its load."""

    at: float
    rest_until: float
    sliced_s: Sequence[float]
    """Of each sliced prefill, what is left of it after its slice."""
    free_blocks: int
    oldest_used_at: float | None
    prefill_rate: float | None
    placed: Sequence[Placed]
    """By proxy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A prefill, or a slice of one."""

    job: Job
    depth: int
    """Blocks of the prompt that are there."""
    tokens: int
    """To be computed after them."""
    held: Sequence[int]
    """All of its blocks that are in use from now on."""
    is_last: bool
    """It ends with the first token."""


class SimWorker:
    """The fleet calls `begin` whenever it may have something to do and `advance` at `engine.next_at`."""

    def __init__(
        self,
        worker_id: str,
        scenario: Scenario,
        mechanisms: Mechanisms,
        *,
        block_tokens: int,
        cache: LruCache,
        phase: float,
        rate_factor: float,
    ) -> None:
        """`cache`: its own, or a pool's. `phase`: 0..1, of its load reports."""
        self.worker_id = worker_id
        self.cache = cache
        self.waiting: list[Job] = []
        self.claims = Claims(self.cache, scenario.event_lag_s, block_tokens=block_tokens)
        self._ledgers = [Ledger() for _ in range(scenario.num_proxies)]
        costs = scenario.costs
        self.engine: Engine = PrefillServer(costs) if isinstance(costs, PrefillCosts) else StepEngine(costs)
        self.prefilling: Job | None = None
        self.sliced: list[Job] = []
        """Between two of their slices, or in one; in the order in which they began."""
        self.is_dead = False
        self.num_slices = 0
        self.cached_tokens = 0
        self._block_tokens = block_tokens
        self._mechanisms = mechanisms
        self._rate = PrefillRate(forgotten_tokens=FORGOTTEN_TOKENS)
        self._known_rate = costs.prefill_rate if scenario.knows_rates else None
        self._rate_factor = rate_factor
        self._lag_s = scenario.load_lag_s
        self._phase_s = phase * self._lag_s
        self._tick = 0
        self._piece_began_at = 0.0
        self._running: _Piece | None = None
        self._is_first_piece = False
        self.work_by_minute: Counter[int] = Counter()
        """Tokens of the pieces that it began in each."""
        self._held: dict[int, Sequence[int]] = {}
        """Blocks that a job holds, by its number."""
        self._told = self._tell(0.0)

    # --- what proxies know ----------------------------------------------------------------------------------

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second, as it has learnt it; None at first."""
        learnt = self._known_rate or self._rate.tokens_per_s
        return None if learnt is None else learnt * self._rate_factor

    @property
    def is_idle(self) -> bool:
        return self.prefilling is None and not self.sliced and not self.waiting and not self.is_dead

    def hit_blocks(self, job: Job, now: float) -> tuple[int, HitSource]:
        """Of its request, by the index."""
        claimed = self.claims.depth(job.request, now)
        if self._mechanisms.pending:
            pending = self.claims.pending_depth(job.request)
            if pending > claimed:
                return pending, "pending"
        return claimed, "claims"

    def expected_blocks(self, job: Job, now: float) -> int:
        """The same with all that is pending, whether or not the policy goes by it: what the load is counted with."""
        return max(self.claims.depth(job.request, now), self.claims.pending_depth(job.request))

    def snapshot_for(self, job: Job, now: float) -> WorkerSnapshot:
        """What the policy is told when the job is placed."""
        blocks, source = self.hit_blocks(job, now)
        return self.snapshot(job.proxy, now, hit_tokens=blocks * self._block_tokens, hit_source=source)

    def snapshot(
        self, proxy: int, now: float, *, hit_tokens: int = 0, hit_source: HitSource = "claims"
    ) -> WorkerSnapshot:
        """As this proxy knows it: its own placements at once, all else as it was told last."""
        self._report(now)
        told, own = self._told, self._ledgers[proxy]
        waiting_us = list(own.waiting_us)
        num_waiting, num_running = own.num_waiting, own.num_running
        running_tokens, waiting_tokens = own.running_tokens, own.waiting_tokens
        for other, placed in enumerate(told.placed):
            if other != proxy:
                waiting_us = [mine + theirs for mine, theirs in zip(waiting_us, placed.waiting_us, strict=True)]
                num_waiting += placed.num_waiting
                num_running += placed.num_running
                running_tokens += placed.running_tokens
                waiting_tokens += placed.waiting_tokens
        rest_until, sliced_s = self._started(proxy)
        waiting_s = [micros / _MICRO for micros in waiting_us]
        for left_s in sliced_s:
            waiting_s[waiting_class(left_s)] += left_s
        used_at = told.oldest_used_at
        return WorkerSnapshot(
            worker_id=self.worker_id,
            hit_tokens=hit_tokens,
            hit_source=hit_source,
            rest_s=max(rest_until - now, 0.0),
            waiting_s=tuple(waiting_s),
            prefill_rate=told.prefill_rate,
            num_waiting=num_waiting,
            num_running=num_running,
            free_tokens=max(told.free_blocks * self._block_tokens - waiting_tokens, 0),
            oldest_age_s=0.0 if used_at is None else max(now - used_at, 0.0),
            running_tokens=running_tokens,
        )

    def _started(self, proxy: int) -> tuple[float, Sequence[float]]:
        """Until when the running slice lasts, and seconds of the sliced prefills after it.

        A proxy sees at once when one of its own starts; until the worker tells, it goes by what it took it for.
        """
        told, job = self._told, self.prefilling
        if job is None or job.proxy != proxy or self._piece_began_at <= told.at or not self._is_first_piece:
            return told.rest_until, told.sliced_s
        first_s = min(job.placed_prefill_s, SLICE_S) if self._mechanisms.slices else job.placed_prefill_s
        left_s = job.placed_prefill_s - first_s
        rest_until = max(told.rest_until, self._piece_began_at + first_s)
        return rest_until, (*told.sliced_s, left_s) if left_s else told.sliced_s

    def _report(self, now: float) -> None:
        """Before anything changes, and before anything is read: tells what was true at the last report's time."""
        if not self._lag_s:
            self._told = self._tell(now)
            return
        tick = math.floor((now + self._phase_s) / self._lag_s)
        if tick > self._tick:
            self._tick = tick
            self._told = self._tell(tick * self._lag_s - self._phase_s)

    def _tell(self, at: float) -> _Told:
        rate = self.prefill_rate
        sliced_s = [self._uncached_tokens(job) / rate for job in self.sliced] if rate else ()
        ends_at = self.engine.prefill_ends_at
        return _Told(
            at=at,
            rest_until=ends_at if ends_at != NEVER else at,
            sliced_s=sliced_s,
            free_blocks=self.cache.num_free,
            oldest_used_at=self.cache.evicted_next_used_at,
            prefill_rate=rate,
            placed=[ledger.placed() for ledger in self._ledgers] if len(self._ledgers) > 1 else (),
        )

    # --- what comes and goes --------------------------------------------------------------------------------

    def place(self, job: Job, now: float) -> None:
        self._report(now)
        self.waiting.append(job)
        self.claims.expect(job.request)
        self._ledgers[job.proxy].place(job)

    def take_away(self, job: Job, now: float) -> None:
        """One that has not started: it goes elsewhere."""
        self._report(now)
        self.waiting.remove(job)
        self.claims.forget(job.request)
        self._ledgers[job.proxy].take_away(job)

    def begin(self, now: float) -> None:
        """Starts a piece of what goes next, if there is anything, room for it, and nothing runs."""
        if self.prefilling is not None or self.is_dead or not (self.waiting or self.sliced):
            return
        job = self._next(now)
        if self.cache.can_hold(job.request.blocks[: self.cache.capacity_blocks]):  # all of it, a sliced one too
            self._report(now)
            self._start(self._piece_of(job), now)

    def _piece_of(self, job: Job) -> _Piece:
        request, block_tokens = job.request, self._block_tokens
        depth = self.cache.depth(request.blocks, request.reusable_blocks)
        uncached = job.prompt_tokens - depth * block_tokens
        whole = request.blocks[: self.cache.capacity_blocks]
        if self._mechanisms.slices:
            slice_ = slice_tokens(self.prefill_rate)
            capacity = self.cache.capacity_blocks * block_tokens
            if is_to_be_sliced(uncached, slice_, job.prompt_tokens, capacity, job.computed_tokens):
                blocks = max(slice_ // block_tokens, 1)
                held = request.blocks[: depth + blocks]
                return _Piece(job=job, depth=depth, tokens=blocks * block_tokens, held=held, is_last=False)
        return _Piece(job=job, depth=depth, tokens=uncached, held=whole, is_last=True)

    def _start(self, piece: _Piece, now: float) -> None:
        job = piece.job
        self._is_first_piece = job not in self.sliced
        if self._is_first_piece:
            self.waiting.remove(job)
            self._ledgers[job.proxy].start(job)
        if piece.is_last and not self._is_first_piece:
            self.sliced.remove(job)
        if self._is_first_piece and not piece.is_last:
            self.sliced.append(job)
        if not piece.is_last:
            self.num_slices += 1
            job.computed_tokens += piece.tokens
        elif job.ttft_s is None:
            # What its own slices have computed was no hit.
            self.cached_tokens += piece.depth * self._block_tokens - job.computed_tokens
        evicted = self.cache.hold(piece.held)
        self._held[job.number] = piece.held
        self.claims.computing(piece.held, piece.depth, evicted, now)
        self.prefilling, self._running, self._piece_began_at = job, piece, now
        self.work_by_minute[int(now // 60)] += piece.tokens
        self.engine.prefill(job, piece.tokens, now)

    def _next(self, now: float) -> Job:
        """By the order, of those that wait and the sliced ones; there is at least one."""
        order, rate = self._mechanisms.order, self.prefill_rate
        if order is None:
            return [*self.sliced, *self.waiting][0]
        best, best_key, left_tokens = None, 0.0, None
        for job in self.sliced:
            uncached = self._uncached_tokens(job)
            left_tokens = uncached if left_tokens is None else min(left_tokens, uncached)
            key = self._key(order, job, uncached, rate, now)
            if best is None or key < best_key:
                best, best_key = job, key
        slice_ = slice_tokens(rate)
        for job in self.waiting:
            uncached = self._uncached_tokens(job)
            if may_pass(uncached, slice_, left_tokens):
                key = self._key(order, job, uncached, rate, now)
                if best is None or key < best_key:
                    best, best_key = job, key
        assert best is not None
        return best

    def _key(self, order: Order, job: Job, uncached_tokens: int, rate: float | None, now: float) -> float:
        prefill_s = uncached_tokens / (rate or DEFAULT_PREFILL_RATE)
        return order_key(order, prefill_s=prefill_s, waited_s=now - job.arrived_at)

    def _uncached_tokens(self, job: Job) -> int:
        depth = self.cache.depth(job.request.blocks, job.request.reusable_blocks)
        return job.prompt_tokens - depth * self._block_tokens

    # --- what ends ------------------------------------------------------------------------------------------

    def advance(self, now: float) -> tuple[Job | None, Sequence[Job]]:
        """At `engine.next_at`: the job that drew its first token, and those that have ended."""
        self._report(now)
        progress = self.engine.advance(now)
        for ended in progress.decoded:
            self._end(ended, now)
        job, piece = progress.prefilled, self._running
        if job is None or piece is None:
            return None, progress.decoded
        self._rate.observe(tokens=piece.tokens, seconds=progress.prefill_s)
        self.claims.computed(now)
        self.prefilling = self._running = None
        if not piece.is_last:
            self.cache.release(self._held.pop(job.number), now)
            return None, progress.decoded
        self.claims.forget(job.request)
        if self.engine.keeps_decodes:
            self._keep_answer(job, now)
        else:
            self.cache.release(self._held.pop(job.number), now)
        self.engine.decode(job, now)
        return job, progress.decoded

    def _keep_answer(self, job: Job, now: float) -> None:
        """Room for what it will generate: blocks that no other prompt has, behind its own."""
        whole = job.kv_tokens // self._block_tokens - len(self._held[job.number])
        first = -1 - (job.number << 20)
        answer = range(first, first - whole, -1)
        if whole > 0 and self.cache.can_hold(answer):
            self.claims.evicted(self.cache.hold(answer), now)
            self._held[job.number] = (*self._held[job.number], *answer)

    def _end(self, job: Job, now: float) -> None:
        held = self._held.pop(job.number, None)
        if held is not None:
            self.cache.release(held, now)
        self._ledgers[job.proxy].end(job)

    def die(self, now: float) -> Sequence[Job]:
        """Returns what it had begun; what it has generated is part of their prompts now. What waits is the caller's."""
        self._report(now)
        running = () if self.prefilling is None else (self.prefilling,)
        begun = dict.fromkeys((*running, *self.sliced))
        for job in begun:
            job.continue_elsewhere(0)
        decoding = self.engine.decoding()
        for job in decoding:
            job.continue_elsewhere(self.engine.generated_tokens(job, now))
        self.is_dead = True
        self.prefilling = None
        self.sliced = []
        return [*begun, *decoding]
