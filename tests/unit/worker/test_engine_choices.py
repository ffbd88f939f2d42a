"""Several choices of one prompt, submitted at once: the prompt is computed once, whoever of them ends early."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from prefixcache.protocol import Sampling
from tests.support.engine_harness import OWNER, RunningEngine, running_engine
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner, expected_output
from worker.runner import Drawn, StepShare

HOT = Sampling(seed=11, temperature=1.0)


class HeldRunner(ScriptedRunner):
    """Waits in one step, by its number from 0, until it is released."""

    def __init__(self, held_step: int) -> None:
        super().__init__()
        self._held_step = held_step
        self._reached, self._released = threading.Event(), threading.Event()

    def execute(self, shares: Sequence[StepShare]) -> list[Drawn | Exception | None]:
        if self.num_steps == self._held_step:
            self._reached.set()
            assert self._released.wait(5)
        return super().execute(shares)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The block runs while the step waits."""
        self.resume()
        assert self._reached.wait(5)
        yield
        self._released.set()


def submit_choices(running: RunningEngine, prompt: Sequence[int], num_choices: int, *, max_tokens: int = 4) -> None:
    """Submits c0, c1 .. while the runner is held, so that none has begun when the last one comes."""
    running.runner.pause()
    for choice in range(num_choices):
        name = f"c{choice}"
        running.submit(generate(name, prompt, sampling=HOT, choice=choice, max_tokens=max_tokens))


def check_tokens(running: RunningEngine, prompt: Sequence[int], choice: int, num_tokens: int) -> None:
    truth = expected_output(prompt, num_tokens, vocab_size=1_000, sampling=HOT, choice=choice)
    assert running.tokens(f"c{choice}") == truth


@pytest.mark.parametrize(("length", "last_tokens"), [(1_000, 8), (993, 1), (1_008, 1), (592, 1), (15, 15)])
def test_all_but_the_first_compute_only_what_no_full_block_holds(length: int, last_tokens: int) -> None:
    prompt = [token % 1_000 for token in range(length)]
    with running_engine() as running:
        submit_choices(running, prompt, 5)
        running.runner.resume()
        usages = [running.end(f"c{choice}").usage for choice in range(5)]
        assert [usage.computed_tokens for usage in usages] == [length, *[last_tokens] * 4]
        assert [usage.cached_tokens + usage.copied_tokens for usage in usages] == [0, *[length - last_tokens] * 4]
        assert running.runner.num_tokens == length + 4 * last_tokens + 5 * 3
        for choice in range(5):
            check_tokens(running, prompt, choice, 4)
        running.assert_nothing_is_held()


def test_choices_differ_by_their_number_alone() -> None:
    with running_engine() as running:
        submit_choices(running, [1, 2, 3], 4, max_tokens=8)
        running.runner.resume()
        running.wait_ended(*(f"c{choice}" for choice in range(4)))
        assert len({tuple(running.tokens(f"c{choice}")) for choice in range(4)}) == 4


@pytest.mark.parametrize("held_step", [0, 1, 2])
def test_when_the_first_is_aborted_in_its_prefill_the_next_goes_on_from_there(held_step: int) -> None:
    """Nothing that the first one computed is computed again."""
    prompt = [token % 1_000 for token in range(1_300)]
    runner = HeldRunner(held_step)
    with running_engine(runner) as running:
        submit_choices(running, prompt, 4)
        with runner.held():
            running.engine.abort(OWNER, "c0")
        assert running.end("c0").reason == "aborted"
        usages = [running.end(f"c{choice}").usage for choice in (1, 2, 3)]
        # What the first one has done when it is aborted, its held step included, is there for the second.
        done = min(512 * (held_step + 1), 1_299)
        assert usages[0].cached_tokens + usages[0].copied_tokens == done
        # Less than a block is left by one that ends, not by one that runs.
        assert [usage.computed_tokens for usage in usages[1:]] == [1 if done == 1_299 else 1_300 - 1_296] * 2
        for choice in (1, 2, 3):
            check_tokens(running, prompt, choice, 4)
        running.assert_nothing_is_held()


def test_an_aborted_follower_holds_up_nobody() -> None:
    prompt = list(range(700))
    runner = HeldRunner(0)
    with running_engine(runner) as running:
        submit_choices(running, prompt, 4)
        with runner.held():
            running.engine.abort(OWNER, "c2")
        assert running.end("c2").reason == "aborted"
        assert running.end("c2").usage.computed_tokens == 0
        for choice in (0, 1, 3):
            assert running.end(f"c{choice}").usage.computed_tokens == (700 if choice == 0 else 700 - 688)
            check_tokens(running, prompt, choice, 4)


def test_when_the_first_fails_the_next_computes_what_is_missing() -> None:
    prompt = list(range(700))
    runner = ScriptedRunner(step_fault=lambda number: RuntimeError("scripted") if number == 1 else None)
    with running_engine(runner) as running:
        submit_choices(running, prompt, 3)
        running.runner.resume()
        assert running.failure("c0").kind == "worker_fault"
        assert [running.end(f"c{choice}").usage.computed_tokens for choice in (1, 2)] == [700 - 512, 700 - 688]
        for choice in (1, 2):
            check_tokens(running, prompt, choice, 4)
