"""What a proxy has placed."""

from __future__ import annotations

from prefixcache.simulation.job import Job
from prefixcache.simulation.ledger import Ledger, Placed
from tests.unit.prefixcache.simulation.traces import request


def _job(prefill_s: float, hit_tokens: int = 0) -> Job:
    job = Job(request((1, 2)), number=1, arrived_at=0.0, proxy=0)
    job.placed_prefill_s, job.placed_hit_tokens = prefill_s, hit_tokens
    return job


def test_a_request_from_its_placement_to_its_end() -> None:
    ledger = Ledger()
    short, long = _job(0.1, hit_tokens=1024), _job(5.0)
    ledger.place(short)
    ledger.place(long)
    assert ledger.placed() == Placed(
        waiting_us=(100_000, 0, 0, 5_000_000, 0),
        num_waiting=2,
        num_running=0,
        running_tokens=2 * 1124,
        waiting_tokens=100 + 1124,
    )
    ledger.start(long)
    assert (ledger.num_waiting, ledger.num_running, ledger.waiting_us) == (1, 1, [100_000, 0, 0, 0, 0])
    ledger.end(long)
    ledger.take_away(short)
    assert ledger.placed() == Placed()
