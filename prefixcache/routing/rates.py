"""Prefill rates: those that workers have measured, and one to go by for those that have not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefixcache.limits import DEFAULT_PREFILL_RATE
from prefixcache.routing.base import WorkerSnapshot


def usual_rate(workers: Sequence[WorkerSnapshot]) -> float:
    """Tokens a second of a worker that has measured nothing: the mean of the known, else DEFAULT_PREFILL_RATE."""
    known = [worker.prefill_rate for worker in workers if worker.prefill_rate]
    return sum(known) / len(known) if known else DEFAULT_PREFILL_RATE


def prefill_rates(workers: Sequence[WorkerSnapshot]) -> Mapping[str, float]:
    """Tokens a second by worker id, the usual rate where none was measured."""
    usual = usual_rate(workers)
    return {worker.worker_id: worker.prefill_rate or usual for worker in workers}
