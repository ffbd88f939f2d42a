"""The engine learns from its own steps how long chunks may be beside decodes, on a clock that only steps move."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.support.engine_harness import RunningEngine, running_engine
from tests.support.manual_clock import ManualClock
from tests.support.requests import generate
from tests.support.seeds import seeded
from tests.support.timed_runner import TimedRunner
from worker.runner import Drawn, StepShare
from worker.sim_costs import CostModel
from worker.sim_runner import SimRunner

CPU = CostModel(
    prefill_us=1_500,
    prefill_us_per_1k_context=1_500,
    step_ms=5,
    itl_ms=40,
    itl_per_sequence_ms=5,
    itl_per_1k_context_ms=5,
)
"""As measured with the demo model on one busy core, in round numbers."""
STEP_S = 0.4


class NotedRunner(SimRunner):
    """A simulated runner whose steps are noted: what their chunks and their decodes took."""

    def __init__(self, costs: CostModel = CPU) -> None:
        self.clock = ManualClock(1_000.0)
        super().__init__(costs=costs, num_blocks=1_024, clock=self.clock, sleep=self._sleep)
        self.costs = costs
        self.chunks_s: list[float] = []
        """Of steps with both."""
        self.chunk_sizes: list[int] = []
        self.prefill_s = self.decode_s = 0.0

    def _sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def execute(self, shares: Sequence[StepShare]) -> list[Drawn | Exception | None]:
        decodes = [share for share in shares if len(share.token_ids) == 1]
        decodes_s = self.costs.step_s(decodes) - self.costs.step_s([])
        chunks_s = self.costs.step_s(shares) - decodes_s
        if decodes and len(shares) > len(decodes):
            self.chunks_s.append(chunks_s)
            self.chunk_sizes.append(sum(len(share.token_ids) for share in shares) - len(decodes))
        self.prefill_s += chunks_s if len(shares) > len(decodes) else 0.0
        self.decode_s += decodes_s
        return super().execute(shares)


def prompt(first: int, length: int) -> list[int]:
    """Shares no block with a prompt from another first id."""
    return [first, *([7] * (length - 1))]


def decoding(running: RunningEngine, name: str = "reader", max_tokens: int = 3_000) -> None:
    """Somebody who reads an answer for the rest of the test."""
    running.submit(generate(name, prompt(1, 30), max_tokens=max_tokens))
    running.wait_for(lambda: running.tokens(name))


def run_prefills(runner: NotedRunner, step_s: float) -> None:
    with running_engine(runner, step_s=step_s, clock=runner.clock) as running:
        decoding(running)
        for number, length in enumerate((2_000, 6_000, 300, 12_000)):
            running.submit(generate(str(number), prompt(10 + number, length), max_tokens=2))
            running.end(str(number))
        running.engine.abort("owner", "reader")
        running.end("reader")


def test_beside_an_answer_no_chunk_takes_much_longer_than_it_may_however_deep_it_stands() -> None:
    runner = NotedRunner()
    run_prefills(runner, STEP_S)
    first, later = runner.chunks_s[:8], runner.chunks_s[8:]
    assert max(first) < 2 * STEP_S, "before anything was measured it goes by the usual speed, and no cost of attention"
    assert max(later) < 1.25 * STEP_S
    assert sum(later) / len(later) > 0.6 * STEP_S, "nor is it wasteful"


def test_without_that_limit_the_reader_waits_many_times_as_long() -> None:
    """What the limit is for."""
    runner = NotedRunner()
    run_prefills(runner, math.inf)
    assert max(runner.chunks_s) > 10 * STEP_S


def test_prefill_and_decode_seconds_are_those_that_each_of_them_took() -> None:
    random = seeded("throughput apart")
    runner = NotedRunner()
    with running_engine(runner, step_s=STEP_S, clock=runner.clock) as running:
        names = [f"r{number}" for number in range(24)]
        for number, name in enumerate(names):
            running.submit(
                generate(name, prompt(number, random.randrange(20, 1_200)), max_tokens=random.choice([1, 60]))
            )
        running.wait_ended(*names)
        running.assert_nothing_is_held()
        usages = [running.end(name).usage for name in names]

        def counted(name: str) -> float:
            value = running.metrics.registry.get_sample_value(f"prefixcache_worker_{name}_total")
            assert value is not None
            return value

        assert counted("prefill_tokens") + counted("decode_tokens") == pytest.approx(
            sum(usage.computed_tokens + usage.output_tokens - 1 for usage in usages), abs=len(names)
        )
        assert counted("decode_tokens") == sum(usage.output_tokens - 1 for usage in usages)
        total_s = counted("prefill_seconds") + counted("decode_seconds")
        assert total_s == pytest.approx(
            running.metrics.registry.get_sample_value("prefixcache_worker_step_seconds_sum")
        )
        assert counted("prefill_seconds") == pytest.approx(runner.prefill_s, rel=0.2)
        assert counted("decode_seconds") == pytest.approx(runner.decode_s, rel=0.5)


def test_a_step_that_failed_counts_neither_as_prefill_nor_as_decode() -> None:
    runner = TimedRunner()
    runner.step_fault = lambda number: RuntimeError("scripted") if number == 0 else None
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("a", prompt(1, 100)))
        running.failure("a")
        running.submit(generate("b", prompt(2, 50), max_tokens=3))
        running.end("b")
        running.assert_nothing_is_held()
        value = running.metrics.registry.get_sample_value
        counted = [value(f"prefixcache_worker_{name}_total") for name in ("prefill_tokens", "decode_tokens")]
        assert counted == [50, 2]
        assert value("prefixcache_worker_prefill_seconds_total") == pytest.approx(0.05)
