"""What the engine counts for `/metrics`: each event of a request once, and what its steps took."""

from __future__ import annotations

from typing import get_args

from prefixcache.metrics import WorkerMetrics
from prefixcache.protocol import EndReason, FailKind
from worker.block_pool import BlockPool
from worker.engine_load import EngineLoad
from worker.pace import Pace
from worker.sequence import Sequence
from worker.step_costs import StepWork


class EngineCounts:
    """Belongs to the step thread. Times are those of the engine's clock."""

    def __init__(self, metrics: WorkerMetrics, *, pool: BlockPool, pace: Pace) -> None:
        for reason in (*get_args(EndReason), *get_args(FailKind)):
            metrics.requests.labels(reason)  # a series that is there from the start shows its first increase
        metrics.blocks.set(pool.num_blocks)
        self._metrics = metrics
        self._pool = pool
        self._pace = pace
        self._num_evictions = 0

    def started(self, sequence: Sequence, now: float) -> None:
        """Its first chunk begins."""
        self._metrics.request_queue_time.observe(now - sequence.arrived_at)

    def preempted(self, count: int) -> None:
        self._metrics.preemptions.inc(count)

    def token(self, sequence: Sequence, now: float) -> None:
        """One was drawn: the first one ends the prefill, each other one a gap."""
        metrics = self._metrics
        metrics.generation_tokens.inc()
        if sequence.last_token_at is not None:
            metrics.inter_token_latency.observe(now - sequence.last_token_at)
            return
        assert sequence.started_at is not None
        metrics.time_to_first_token.observe(now - sequence.arrived_at)
        metrics.request_prefill_time.observe(now - sequence.started_at)

    def ended(self, sequence: Sequence, reason: str, now: float) -> None:
        """Whatever ended it."""
        metrics = self._metrics
        metrics.requests.labels(reason).inc()
        if sequence.started_at is not None:
            metrics.prompt_tokens.inc(sequence.num_prompt_tokens)
            metrics.cached_tokens.inc(sequence.cached_tokens)
            metrics.copied_tokens.inc(sequence.copied_tokens)
        if sequence.first_token_at is not None:
            metrics.request_decode_time.observe(now - sequence.first_token_at)

    def step(self, work: StepWork | None, seconds: float) -> None:
        """A step of that work has ended; None for one of which nothing was computed."""
        metrics = self._metrics
        metrics.step_seconds.observe(seconds)
        if work is None:
            return
        prefill_s, decode_s = self._pace.split(work, seconds)
        metrics.prefill_tokens.inc(work.chunk_tokens)
        metrics.prefill_seconds.inc(prefill_s)
        metrics.decode_tokens.inc(work.num_decodes)
        metrics.decode_seconds.inc(decode_s)

    def gauges(self, load: EngineLoad, *, rest_s: float) -> None:
        """The state between two steps."""
        pool, metrics = self._pool, self._metrics
        metrics.requests_running.set(load.running)
        metrics.requests_waiting.set(load.waiting)
        metrics.kv_cache_usage.set(pool.num_in_use / pool.num_blocks)
        metrics.cached_blocks.set(pool.num_registered)
        metrics.prefill_rate.set(self._pace.prefill_rate)
        metrics.prefill_rest.set(rest_s)
        metrics.evictions.inc(pool.num_evictions - self._num_evictions)
        self._num_evictions = pool.num_evictions
