"""What the engine tells of its requests' time and tokens, to the second, under a clock that only steps move."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.metrics import WorkerMetrics
from tests.support.engine_harness import OWNER, running_engine
from tests.support.manual_clock import ManualClock
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner
from tests.support.seeds import seeded
from worker.runner import Drawn, StepShare

HISTOGRAMS = (
    "request_queue_time",
    "request_prefill_time",
    "request_decode_time",
    "time_to_first_token",
    "inter_token_latency",
)


class TimedRunner(ScriptedRunner):
    """Its steps take the given seconds on `clock`, those after them none."""

    def __init__(self, *durations_s: float, num_blocks: int = 256) -> None:
        super().__init__(num_blocks=num_blocks)
        self.clock = ManualClock(1_000.0)
        self._durations_s = list(durations_s)

    def execute(self, shares: Sequence[StepShare]) -> list[Drawn | Exception | None]:
        results = super().execute(shares)
        self.clock.now += self._durations_s.pop(0) if self._durations_s else 0
        return results


def totals(metrics: WorkerMetrics) -> dict[str, tuple[float, float]]:
    """(observations, their sum in seconds) of each histogram of requests."""

    def value(name: str, suffix: str) -> float:
        found = metrics.registry.get_sample_value(f"prefixcache_worker_{name}_seconds_{suffix}")
        assert found is not None
        return found

    return {name: (value(name, "count"), value(name, "sum")) for name in HISTOGRAMS}


def ended(metrics: WorkerMetrics) -> dict[str, float]:
    """Requests by what became of them, without those that nothing did."""
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    counts = {s.labels["reason"]: s.value for s in samples if s.name == "prefixcache_worker_requests_total"}
    assert set(counts) == {"stop", "length", "aborted", "refused", "overloaded", "draining", "worker_fault"}
    return {reason: count for reason, count in counts.items() if count}


def test_times_of_two_requests_that_overlap() -> None:
    """
    a   | waits 3 ...... step of 2 | 0.5 | 0.25 |           received at 0, three tokens
    b             waits 2 ........ | 0.5 | 0.25 |           received at 3, two tokens
    """
    runner = TimedRunner(2.0, 0.5, 0.25)
    with running_engine(runner, clock=runner.clock) as running:
        runner.pause()
        running.submit(generate("a", list(range(20)), max_tokens=3))
        runner.wait_until_held()
        runner.clock.now += 3
        running.submit(generate("b", [500, 501], max_tokens=2))
        runner.resume()
        usages = [running.end(name).usage for name in "ab"]
        assert totals(running.metrics) == {
            "request_queue_time": (2, 0 + 2),
            "request_prefill_time": (2, 5 + 0.5),
            "request_decode_time": (2, 0.75 + 0.25),
            "time_to_first_token": (2, 5 + 2.5),
            "inter_token_latency": (3, 0.5 + 0.25 + 0.25),
        }
        assert [(usage.queue_s, usage.prefill_s, usage.decode_s) for usage in usages] == [(0, 5, 0.75), (2, 0.5, 0.25)]
        assert ended(running.metrics) == {"length": 2}


def test_observations_stand_in_the_bucket_of_their_value() -> None:
    runner = TimedRunner(2.0, 0.5)
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("a", [1], max_tokens=2))
        running.end("a")
        buckets = {
            le: running.metrics.registry.get_sample_value(
                "prefixcache_worker_inter_token_latency_seconds_bucket", {"le": le}
            )
            for le in ("0.3", "0.5", "1.0", "+Inf")
        }
        assert buckets == {"0.3": 0, "0.5": 1, "1.0": 1, "+Inf": 1}


def test_a_request_that_never_started_has_no_times() -> None:
    runner = TimedRunner(2.0, num_blocks=4)
    with running_engine(runner, clock=runner.clock) as running:
        runner.pause()
        running.submit(generate("a", list(range(50)), max_tokens=1))
        runner.wait_until_held()
        running.submit(generate("b", [1] * 50))
        running.engine.abort(OWNER, "b")
        with pytest.raises(InvalidRequest):
            running.submit(generate("c", [1_000]))
        runner.resume()
        running.wait_ended("a", "b")
        assert totals(running.metrics) == {
            "request_queue_time": (1, 0.0),
            "request_prefill_time": (1, 2.0),
            "request_decode_time": (1, 0.0),
            "time_to_first_token": (1, 2.0),
            "inter_token_latency": (0, 0.0),
        }
        assert ended(running.metrics) == {"length": 1, "aborted": 1}


def test_a_request_that_fails_in_its_prefill_has_waited_and_no_more() -> None:
    runner = TimedRunner(2.0)
    runner.share_fault = lambda share: RuntimeError("scripted") if share.token_ids[0] == 7 else None
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("a", [7, 8]))
        running.failure("a")
        assert totals(running.metrics) == {name: (0, 0.0) for name in HISTOGRAMS} | {"request_queue_time": (1, 0.0)}
        assert ended(running.metrics) == {"worker_fault": 1}


def test_a_request_cut_off_in_its_answer_has_decoded_until_then() -> None:
    runner = TimedRunner(2.0, 0.5, 0.5)
    runner.step_fault = lambda number: RuntimeError("scripted") if number == 3 else None
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("a", [1], max_tokens=9))
        running.failure("a")
        assert totals(running.metrics)["request_decode_time"] == (1, 1.0)
        assert totals(running.metrics)["inter_token_latency"] == (2, 1.0)


def test_tokens_agree_with_usage() -> None:
    prompt = list(range(100))
    with running_engine() as running:
        for name in "abc":
            running.submit(generate(name, prompt))
            running.end(name)
        running.assert_nothing_is_held()
        registry = running.metrics.registry
        values = {
            name: registry.get_sample_value(f"prefixcache_worker_{name}_total")
            for name in (
                "prompt_tokens",
                "cached_tokens",
                "copied_tokens",
                "generation_tokens",
                "preemptions",
                "evicted_blocks",
            )
        }
        assert values == {
            "prompt_tokens": 300,
            "cached_tokens": 192,
            "copied_tokens": 6,
            "generation_tokens": 12,
            "preemptions": 0,
            "evicted_blocks": 0,
        }
        assert registry.get_sample_value("prefixcache_worker_cached_blocks") == 6


def test_each_request_is_observed_once_however_often_it_begins_again() -> None:
    random = seeded("observed once")
    runner = TimedRunner(*[0.125] * 2_000, num_blocks=8)
    with running_engine(runner, clock=runner.clock) as running:
        names = [f"r{number}" for number in range(20)]
        for name in names:
            running.submit(generate(name, [random.randrange(1_000) for _ in range(20)], max_tokens=60))
        running.wait_ended(*names)
        usages = [running.end(name).usage for name in names]
        assert sum(usage.preemptions for usage in usages) > 0
        tokens = sum(usage.output_tokens for usage in usages)
        assert totals(running.metrics) == {
            "request_queue_time": (20, sum(usage.queue_s for usage in usages)),
            "request_prefill_time": (20, sum(usage.prefill_s for usage in usages)),
            "request_decode_time": (20, sum(usage.decode_s for usage in usages)),
            "time_to_first_token": (20, sum(usage.queue_s + usage.prefill_s for usage in usages)),
            "inter_token_latency": (tokens - 20, sum(usage.decode_s for usage in usages)),
        }
