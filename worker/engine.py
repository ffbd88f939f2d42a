"""The engine: one thread that takes commands, plans a step, lets the runner compute it and hands out what came of it.

    any thread ── submit, abort ──► inbox ──► step thread ── StepOutput ──► on_output
                                                 │  schedule -> execute -> settle each share
                                                 └─ sleeps on a condition while there is nothing to do

What goes wrong stays where it happened:

    one share cannot be made, or its       that request fails
    result is an exception or nonsense
    the whole step raises                  the requests of that step fail; their blocks of it were never registered
    the engine's own bookkeeping raises    nothing can be trusted any more: every request fails, the thread ends
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from threading import Condition, Thread

from prefixcache.errors import Draining, Overloaded
from prefixcache.limits import (
    ENGINE_STOP_TIMEOUT_S,
    MAX_STEP_S,
    MAX_WAITING_REQUESTS,
    RETRY_AFTER_MOST_S,
    RETRY_AFTER_S,
)
from prefixcache.load import WorkerLoad
from prefixcache.metrics import WorkerMetrics
from prefixcache.protocol import End, EndReason, Fail, FailKind, Generate, Started, StepEntry
from prefixcache.routing.order import Order
from prefixcache.types import INDEX_STRIDE
from worker.block_pool import BlockPool
from worker.engine_counts import EngineCounts
from worker.engine_load import EngineLoad
from worker.index_changes import IndexChanges
from worker.pace import Pace
from worker.prediction_check import PredictionCheck
from worker.runner import Drawn, Runner, RunnerLimits, StepShare
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.step_plan import PlannedShare, StepPlan
from worker.workload import Workload

logger = logging.getLogger(__name__)

Owner = Hashable
"""Whoever submits: its requests' ids are its own, and their events come back under its name."""

Event = Started | StepEntry | End | Fail


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one turn of the step thread made, in the order in which it happened to each request."""

    events: list[tuple[Owner, Event]]
    load: EngineLoad
    index_changed: bool
    """The publisher has something to take."""


def effective_limits(limits: RunnerLimits) -> RunnerLimits:
    """The runner's limits with no longer a context than all blocks together hold: one request must always fit."""
    return replace(limits, max_model_len=min(limits.max_model_len, limits.num_blocks * limits.block_size))


class Engine:
    """Runs requests on a runner. `on_output` is called from the step thread and must not block."""

    def __init__(
        self,
        runner: Runner,
        *,
        metrics: WorkerMetrics,
        on_output: Callable[[StepOutput], None],
        stride: int = INDEX_STRIDE,
        order: Order = "mean",
        step_s: float = MAX_STEP_S,
        max_waiting: int = MAX_WAITING_REQUESTS,
        checks_integrity: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits = effective_limits(runner.limits)
        self.metrics = metrics
        self._runner = runner
        self._on_output = on_output
        self._max_waiting = max_waiting
        self._checks_integrity = checks_integrity
        self._clock = clock
        self._pool = BlockPool(limits.num_blocks, stride=stride, clock=clock)
        self._scheduler = Scheduler(self._pool, block_size=limits.block_size, order=order, step_s=step_s)
        self._predictions = PredictionCheck(self.index_changes, metrics, block_size=limits.block_size, stride=stride)
        self._pace = Pace(pair_rows=limits.pair_rows)
        self._counts = EngineCounts(metrics, pool=self._pool, pace=self._pace)
        self._events: list[tuple[Owner, Event]] = []
        self._num_steps = 0

        self._condition = Condition()
        self._submitted: list[Sequence] = []
        self._aborted: list[tuple[Owner, str | None, bool]] = []
        self._draining = False
        self._stopping = False
        self._failure: Exception | None = None
        self._load = EngineLoad(step=0, running=0, waiting=0, prefilling=0)
        self._workload = Workload(available_blocks=limits.num_blocks, free_blocks=limits.num_blocks)
        self._thread = Thread(target=self._run, name="step", daemon=True)

    # --- for other threads ----------------------------------------------------------------------------------

    @property
    def index_changes(self) -> IndexChanges:
        """Thread-safe: what the index must learn of the pool."""
        return self._pool.index_changes

    @property
    def failure(self) -> Exception | None:
        """What ended the step thread; None while the engine serves."""
        return self._failure

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and not self._draining and not self._stopping and self._failure is None

    @property
    def load(self) -> EngineLoad:
        """As of the last step, with the requests that came since counted as waiting."""
        with self._condition:
            return self._current_load()

    def measure(self) -> WorkerLoad:
        """What the worker says of itself in the index, at this moment."""
        with self._condition:
            workload = self._workload
        return workload.record(self._clock())

    def start(self) -> None:
        """Starts the step thread."""
        self._thread.start()

    def submit(self, owner: Owner, request: Generate) -> int:
        """Queues a request and returns how many wait already. Its id must not be live for this owner.

        Raises InvalidRequest or ContextLengthExceeded for what can never be served, Overloaded if too many wait,
        Draining if the engine is ending.
        """
        sequence = Sequence(owner, request, self.limits, arrived_at=self._clock())
        with self._condition:
            if self._draining or self._stopping or self._failure is not None:
                raise Draining("the worker is shutting down")
            position = self._current_load().waiting
            if position >= self._max_waiting:
                raise self._overloaded(position)
            self._submitted.append(sequence)
            self._condition.notify()
        return position

    def _overloaded(self, num_waiting: int) -> Overloaded:
        submitted_tokens = sum(sequence.num_tokens for sequence in self._submitted)
        workload = replace(self._workload, waiting_tokens=self._workload.waiting_tokens + submitted_tokens)
        again_s = min(max(math.ceil(workload.ahead_s(self._clock())), RETRY_AFTER_S), RETRY_AFTER_MOST_S)
        return Overloaded(
            f"{num_waiting} requests wait already, the limit is {self._max_waiting}; try again in {again_s} s",
            retry_after_s=again_s,
        )

    def abort(self, owner: Owner, request_id: str | None = None, *, if_waiting: bool = False) -> None:
        """Ends a request, or without an id all of this owner's. One that has ended already is passed over.

        `if_waiting`: so is one that has started, also if it lost its blocks and waits again.
        """
        with self._condition:
            self._aborted.append((owner, request_id, if_waiting))
            self._condition.notify()

    def drain(self) -> None:
        """Takes no further request; those it has go on."""
        with self._condition:
            self._draining = True

    def stop(self) -> None:
        """Ends the step thread after its current step; requests that still live fail as draining.

        Blocks for at most ENGINE_STOP_TIMEOUT_S: a runner that hangs is left behind with its daemon thread.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(ENGINE_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the current step did not end within %g s", ENGINE_STOP_TIMEOUT_S)

    def _current_load(self) -> EngineLoad:
        load = self._load
        return replace(load, waiting=load.waiting + len(self._submitted)) if self._submitted else load

    # --- the step thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._scheduler.has_work:
                    self._step()
                self._note_workload()
                self._hand_out()
            self._fail_all("draining", "the worker is shutting down")
        except Exception as error:
            logger.critical("engine ends: its bookkeeping failed", exc_info=True)
            with self._condition:
                self._failure = error
                late, self._submitted = self._submitted, []
            for sequence in [*self._scheduler.live(), *late]:
                self._counts.ended(sequence, "worker_fault", self._clock())
                self._report(sequence, Fail(id=sequence.id, kind="worker_fault", message=f"the engine broke: {error}"))
        self._hand_out()

    def _take_commands(self) -> bool:
        """Waits until there is something to do and takes the inbox; False when the thread is to end."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._submitted or self._aborted or self._stopping or self._scheduler.has_work
            )
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, []
            for sequence in submitted:
                self._scheduler.add(sequence)
            self._note_load()
        for owner, request_id, if_waiting in aborted:
            for sequence in self._scheduler.of_owner(owner, request_id):
                if not (if_waiting and sequence.started_at is not None):
                    self._end(sequence, "aborted")
        return not self._stopping

    def _note_load(self) -> None:
        scheduler = self._scheduler
        self._load = EngineLoad(
            step=self._num_steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            prefilling=scheduler.num_prefilling,
        )

    def _note_workload(self, chunk_tokens: int = 0, step_began_at: float | None = None) -> None:
        """Of a step that begins, or of the time between two."""
        workload = Workload(
            prefill_rate=self._pace.prefill_rate,
            inter_token_latency_s=self._pace.inter_token_latency_s,
            prefill_tokens=self._scheduler.prefill_tokens,
            chunk_tokens=chunk_tokens,
            step_began_at=step_began_at,
            sliced_tokens=self._scheduler.sliced_tokens,
            waiting_tokens=self._scheduler.waiting_tokens,
            available_blocks=self._pool.num_available,
            free_blocks=self._pool.num_free,
            evicted_next_used_at=self._pool.evicted_next_used_at,
        )
        with self._condition:
            self._workload = workload

    def _step(self) -> None:
        began = self._clock()
        plan = self._scheduler.schedule(
            now=began, prefill_rate=self._pace.prefill_rate or None, chunk_cost=self._pace.chunk_cost
        )
        work = plan.work()
        self._note_workload(work.chunk_tokens, began)
        for sequence in plan.admitted:
            if sequence.started_at is None:
                sequence.started_at = began
                self._counts.started(sequence, began)
                self._report(sequence, Started(id=sequence.id, cached_tokens=sequence.cached_tokens))
                self._predictions.check(sequence)
        self._counts.preempted(len(plan.preempted))
        for sequence in plan.preempted:
            logger.info("request %s lost its blocks and will begin again", sequence.id)
        if plan.admitted or plan.preempted:
            self._hand_out()
        is_computed = self._compute(plan)
        self._num_steps += 1
        seconds = self._clock() - began
        if is_computed:
            self._pace.observe(work, seconds)
        self._counts.step(work if is_computed else None, seconds)
        if self._checks_integrity:
            self._scheduler.check_integrity()

    def _compute(self, plan: StepPlan) -> bool:
        """False if nothing could be computed."""
        planned, shares = self._step_shares(plan)
        if not shares:
            return False
        try:
            results = self._runner.execute(shares)
            if len(results) != len(shares):
                raise RuntimeError(f"the runner gave {len(results)} results for {len(shares)} shares")
        except Exception as error:
            logger.exception("step of %d requests failed", len(shares))
            for share in planned:
                self._fail(share.sequence, "worker_fault", f"the worker's step failed: {error}")
            return False
        now = self._clock()
        for share, result in zip(planned, results, strict=True):
            try:
                self._settle(share, result, now)
            except Exception as error:
                self._fail_alone(share.sequence, error)
        return True

    def _step_shares(self, plan: StepPlan) -> tuple[list[PlannedShare], list[StepShare]]:
        """The shares of the plan as the runner is told them, without those that could not be made."""
        planned: list[PlannedShare] = []
        shares: list[StepShare] = []
        for share in plan.shares:
            try:
                shares.append(share.step_share())
                planned.append(share)
            except Exception as error:
                self._fail_alone(share.sequence, error)
        return planned, shares

    def _settle(self, share: PlannedShare, result: Drawn | Exception | None, now: float) -> None:
        """Counts a share whose KV was computed and takes its token; raises the error that struck it."""
        sequence = share.sequence
        if isinstance(result, Exception):
            raise result
        draws = share.num_tokens == sequence.num_uncomputed_tokens
        if draws != (result is not None):
            raise RuntimeError(f"the runner drew {result}, but {'a' if draws else 'no'} token was asked for")
        self._scheduler.advance(share)
        if result is None:
            return
        if (result.logprobs is None) != (sequence.sampling.top_logprobs is None):
            asked = sequence.sampling.top_logprobs
            raise RuntimeError(f"the runner gave log probabilities {result.logprobs}, asked for were {asked}")
        index = sequence.num_output_tokens
        reason = sequence.append(result.token_id)
        self._counts.token(sequence, now)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.last_token_at = now
        logprobs = None if result.logprobs is None else (result.logprobs,)
        self._report(sequence, StepEntry(id=sequence.id, index=index, ids=(result.token_id,), logprobs=logprobs))
        if reason is not None:
            self._end(sequence, reason)

    # --- ends of requests -----------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, reason: EndReason) -> None:
        self._scheduler.finish(sequence)
        self._counts.ended(sequence, reason, self._clock())
        self._report(sequence, End(id=sequence.id, reason=reason, usage=sequence.usage(self._clock())))

    def _fail_alone(self, sequence: Sequence, error: Exception) -> None:
        """Ends the request that `error` struck; nobody else is concerned."""
        logger.error("request %s failed in its step", sequence.id, exc_info=error)
        self._fail(sequence, "worker_fault", f"the worker failed on this request: {error}")

    def _fail(self, sequence: Sequence, kind: FailKind, message: str) -> None:
        self._scheduler.finish(sequence, failed=True)
        self._counts.ended(sequence, kind, self._clock())
        self._report(sequence, Fail(id=sequence.id, kind=kind, message=message))

    def _fail_all(self, kind: FailKind, message: str) -> None:
        for sequence in self._scheduler.live():
            self._fail(sequence, kind, message)

    def _report(self, sequence: Sequence, event: Event) -> None:
        self._events.append((sequence.owner, event))

    def _hand_out(self) -> None:
        events, self._events = self._events, []
        with self._condition:
            self._note_load()
            load = self._current_load()
        self._counts.gauges(load, rest_s=self._workload.rest_s(self._clock()))
        self._on_output(StepOutput(events=events, load=load, index_changed=bool(self.index_changes)))
