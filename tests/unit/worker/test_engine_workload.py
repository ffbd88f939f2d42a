"""What the engine says of its own load, read from another thread while a step runs and between steps."""

from __future__ import annotations

import pytest

from prefixcache.load import NO_WAITING, WorkerLoad
from prefixcache.routing.slices import slice_tokens
from tests.support.engine_harness import OWNER, RunningEngine, running_engine
from tests.support.requests import generate
from tests.support.timed_runner import TimedRunner


def measured(running: RunningEngine) -> WorkerLoad:
    return running.engine.measure()


def metric(running: RunningEngine, name: str) -> float | None:
    return running.metrics.registry.get_sample_value(f"prefixcache_worker_{name}")


def test_a_worker_that_has_done_nothing_knows_no_speed() -> None:
    with running_engine(TimedRunner()) as running:
        assert measured(running) == WorkerLoad(
            rest_s=0,
            prefill_rate=0,
            inter_token_latency_s=0,
            available_blocks=256,
            free_blocks=256,
            oldest_age_s=0,
        )


def test_the_rest_of_a_prefill_while_its_second_chunk_runs() -> None:
    runner = TimedRunner()
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("warm", list(range(500, 912)), max_tokens=1))
        running.end("warm")
        running.wait_for(lambda: measured(running).prefill_rate == pytest.approx(1_000))
        assert measured(running).rest_s == 0
        assert metric(running, "prefill_tokens_per_second") == pytest.approx(1_000)
        runner.pause()
        running.submit(generate("a", [7] * 1_400, max_tokens=1))
        runner.wait_until_held()
        assert measured(running).rest_s == pytest.approx(1.4)
        runner.clock.now += 0.5
        assert measured(running).rest_s == pytest.approx(0.9)
        runner.clock.now += 100
        assert measured(running).rest_s == pytest.approx(1.4 - 0.512), "never below what the next chunks take"
        runner.resume()
        running.end("a")
        running.assert_nothing_is_held()
        assert measured(running).rest_s == 0
        assert metric(running, "prefill_rest_seconds") == 0


def test_a_long_prefill_is_a_slice_in_hand_and_a_rest_that_others_may_pass() -> None:
    slice_s = slice_tokens(1_000) / 1_000
    runner = TimedRunner(num_blocks=1_024)
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("warm", list(range(500, 912)), max_tokens=1))
        running.end("warm")
        runner.pause()
        running.submit(generate("a", [7] * 9_000, max_tokens=1))
        runner.wait_until_held()
        assert measured(running).rest_s == pytest.approx(slice_s, abs=0.002)
        assert measured(running).sliced_s == pytest.approx((0.0, 0.0, 0.0, 9.0 - slice_s, 0.0), abs=0.002)
        runner.clock.now += 0.5
        assert measured(running).rest_s == pytest.approx(slice_s - 0.5, abs=0.002)
        assert measured(running).sliced_s == pytest.approx((0.0, 0.0, 0.0, 9.0 - slice_s, 0.0), abs=0.002)
        runner.resume()
        running.end("a")
        running.assert_nothing_is_held()
        assert (measured(running).rest_s, measured(running).sliced_s) == (0, NO_WAITING)


def test_a_decode_in_work_is_a_rest_and_its_steps_are_the_inter_token_latency() -> None:
    runner = TimedRunner()
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("a", [7], max_tokens=50))
        running.end("a")
        running.wait_for(lambda: measured(running).inter_token_latency_s == pytest.approx(0.001))
        assert measured(running).prefill_rate == 0, "a share of one token is a decode"
        runner.pause()
        running.submit(generate("b", [8], max_tokens=2))
        runner.wait_until_held()
        assert measured(running).rest_s == pytest.approx(0.001)
        runner.clock.now += 0.01
        assert measured(running).rest_s == 0


def test_blocks_that_can_be_had_and_the_age_of_the_one_that_goes_next() -> None:
    runner = TimedRunner()
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("a", list(range(160)), max_tokens=1))
        running.end("a")
        running.assert_nothing_is_held()
        runner.clock.now += 30
        assert measured(running).available_blocks == 256
        assert measured(running).free_blocks == 256 - 10
        assert measured(running).oldest_age_s == pytest.approx(30)
        runner.pause()
        running.submit(generate("b", list(range(160)), max_tokens=1))
        runner.wait_until_held()
        assert measured(running).available_blocks == 256 - 10
        assert measured(running).oldest_age_s == 0, "its last block idles; a copy of it was just made"
        running.engine.abort(OWNER, "b")
        runner.resume()
        running.wait_ended("b")
        running.assert_nothing_is_held()
        assert measured(running).available_blocks == 256


def test_a_step_that_failed_teaches_nothing() -> None:
    runner = TimedRunner()
    runner.step_fault = lambda number: RuntimeError("scripted") if number == 0 else None
    with running_engine(runner, clock=runner.clock) as running:
        running.submit(generate("a", list(range(400))))
        running.failure("a")
        running.assert_nothing_is_held()
        assert measured(running).prefill_rate == 0
        assert measured(running).rest_s == 0
