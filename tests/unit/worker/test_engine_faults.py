"""What goes wrong in a step stays with those whom it struck."""

from __future__ import annotations

import logging

import pytest

from prefixcache.errors import Draining
from prefixcache.protocol import TokenLogprobs
from tests.support.engine_harness import RunningEngine, running_engine
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner, expected_output
from worker.runner import Drawn, SampleSpec, StepShare
from worker.sequence import Sequence


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_output(prompt, num_tokens, vocab_size=1_000)


def test_a_fault_of_one_share_fails_that_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fault(share: StepShare) -> Exception | None:
        return ValueError("bad draw") if 13 in share.token_ids else None

    with running_engine(ScriptedRunner(share_fault=fault)) as running:
        running.runner.pause()
        running.submit(generate("a", [1, 2, 3]))
        running.submit(generate("b", [13] * 40))
        running.runner.resume()
        failure = running.failure("b")
        assert (failure.kind, failure.message) == ("worker_fault", "the worker failed on this request: bad draw")
        assert running.end("a").reason == "length"
        assert "bad draw" in caplog.text
        running.assert_nothing_is_held()


def test_a_share_that_cannot_be_made_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_spec = Sequence.sample_spec

    def broken(sequence: Sequence) -> SampleSpec:
        if sequence.id == "b":
            raise MemoryError("no room for its output")
        return sample_spec(sequence)

    monkeypatch.setattr(Sequence, "sample_spec", broken)
    with running_engine() as running:
        running.runner.pause()
        for name in "abc":
            running.submit(generate(name, list(range(40)), max_tokens=6))
        running.runner.resume()
        running.wait_ended(*"abc")
        assert running.failure("b").message == "the worker failed on this request: no room for its output"
        assert running.tokens("a") == running.tokens("c") == expected(list(range(40)), 6)
        running.assert_nothing_is_held()


def test_blocks_of_a_failed_share_are_not_trusted() -> None:
    faults = [RuntimeError("once")]
    runner = ScriptedRunner(share_fault=lambda _share: faults.pop() if faults else None)
    prompt = list(range(100))
    with running_engine(runner) as running:
        running.submit(generate("a", prompt))
        running.failure("a")
        running.submit(generate("b", prompt))
        assert running.end("b").usage.cached_tokens == 0
        assert running.tokens("b") == expected(prompt, 4)


def test_a_failed_step_fails_its_requests_and_none_of_its_blocks_is_trusted(caplog: pytest.LogCaptureFixture) -> None:
    runner = ScriptedRunner(step_fault=lambda number: RuntimeError("out of memory") if number == 1 else None)
    prompt = list(range(700))
    with running_engine(runner) as running:
        running.submit(generate("a", prompt))
        failure = running.failure("a")
        assert failure.kind == "worker_fault"
        assert "out of memory" in failure.message
        running.submit(generate("b", prompt))
        assert running.end("b").usage.cached_tokens == 512
        assert running.tokens("b") == expected(prompt, 4)
        assert "step of 1 requests failed" in caplog.text
        running.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([], "0 results for 1 shares"),
        ([None], "drew None"),
        ([Drawn(token_id=5_000, logprobs=None)], "drew token 5000"),
        ([Drawn(token_id=-1, logprobs=None)], "drew token -1"),
        ([Drawn(token_id=1, logprobs=TokenLogprobs(-1.0))], "logprob=-1.0, top=()), asked for were None"),
    ],
)
def test_a_runner_that_answers_nonsense_fails_the_request(result: list[Drawn | None], message: str) -> None:
    class Nonsense(ScriptedRunner):
        def execute(self, shares: object) -> list[Drawn | Exception | None]:
            return list(result)

    with running_engine(Nonsense()) as running:
        running.submit(generate("a", [1]))
        assert message in running.failure("a").message
        running.assert_nothing_is_held()


def test_broken_bookkeeping_ends_the_engine_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    running = RunningEngine(ScriptedRunner(step_delay_s=0.001), max_waiting=10)
    running.engine.start()
    running.submit(generate("a", list(range(20)), max_tokens=1_000))
    running.wait_for(lambda: running.tokens("a"))
    running.engine._pool._num_idle += 1
    failure = running.failure("a")
    assert failure.kind == "worker_fault"
    assert running.engine.failure is not None
    assert not running.engine.is_serving
    with pytest.raises(Draining):
        running.submit(generate("b", [1]))
    running.engine.stop()
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)


def test_stopping_hands_requests_back_as_draining() -> None:
    with running_engine(ScriptedRunner(step_delay_s=0.001)) as running:
        running.submit(generate("a", [1], max_tokens=4_000))
        running.wait_for(lambda: running.tokens("a"))
        running.engine.stop()
        assert running.failure("a").kind == "draining"
        with pytest.raises(Draining, match="shutting down"):
            running.submit(generate("b", [1]))


def test_one_that_drains_takes_nothing_new_and_goes_on_with_what_it_has() -> None:
    with running_engine() as running:
        running.runner.pause()
        running.submit(generate("a", [1], max_tokens=6))
        assert running.engine.is_serving
        running.engine.drain()
        assert not running.engine.is_serving and not running.engine.load.is_idle
        with pytest.raises(Draining, match="shutting down"):
            running.submit(generate("b", [1]))
        running.runner.resume()
        assert running.end("a").reason == "length"
        assert running.tokens("a") == expected([1], 6)
        running.wait_for(lambda: running.engine.load.is_idle)
