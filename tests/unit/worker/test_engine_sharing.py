"""Requests that arrive together with one prompt: it is computed once, whoever of them ends early."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixcache.limits import MAX_STEP_TOKENS
from prefixcache.protocol import Generate
from tests.support.engine_harness import OWNER, running_engine
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner
from worker.runner import Runner
from worker.sim_costs import CostModel
from worker.sim_runner import SimRunner

PROMPT = [number % 251 for number in range(2_048)]
EIGHT = [f"r{number}" for number in range(8)]


def scripted() -> Runner:
    return ScriptedRunner(num_blocks=1_024)


def simulated() -> Runner:
    return SimRunner(costs=CostModel(speed=float("inf")), num_blocks=1_024)


def together(*tails: int) -> list[Generate]:
    return [generate(name, [*PROMPT, *tails], max_tokens=3) for name in EIGHT]


@pytest.mark.parametrize("make_runner", [scripted, simulated])
@pytest.mark.parametrize("tails", [(), (7,)], ids=["whole blocks", "a token more"])
def test_eight_equal_prompts_compute_one_and_seven_tokens(
    make_runner: Callable[[], Runner], tails: tuple[int, ...]
) -> None:
    requests = together(*tails)
    num_prompt = len(PROMPT) + len(tails)
    with running_engine(make_runner(), requests=requests) as running:
        running.wait_ended(*EIGHT)
        usages = [running.end(name).usage for name in EIGHT]
        assert sum(usage.computed_tokens for usage in usages) == num_prompt + 7
        assert all(each.computed_tokens + each.copied_tokens + each.cached_tokens == num_prompt for each in usages)
        assert len({tuple(running.tokens(name)) for name in EIGHT}) == 1
        running.assert_nothing_is_held()


@pytest.mark.parametrize("num_aborted", [1, 3])
def test_the_next_one_takes_over_where_those_before_it_were_aborted(num_aborted: int) -> None:
    """In the middle of its chunk; what was computed until then is computed by nobody else."""
    runner = ScriptedRunner(num_blocks=1_024)
    runner.pause()
    with running_engine(runner, requests=together()) as running:
        runner.wait_until_held()
        for name in EIGHT[:num_aborted]:
            running.engine.abort(OWNER, name)
        runner.resume()
        running.wait_ended(*EIGHT)
        assert [running.end(name).reason for name in EIGHT] == ["aborted"] * num_aborted + ["length"] * (
            8 - num_aborted
        )
        computed = [running.end(name).usage.computed_tokens for name in EIGHT]
        rest = len(PROMPT) - MAX_STEP_TOKENS
        assert computed[0] == MAX_STEP_TOKENS
        assert sorted(computed[1:], reverse=True) == [rest, *[1] * (7 - num_aborted), *[0] * (num_aborted - 1)]
        running.assert_nothing_is_held()


def test_the_next_one_takes_over_where_the_first_one_failed() -> None:
    runner = ScriptedRunner(num_blocks=1_024)
    faults = [RuntimeError("scripted")]
    runner.share_fault = lambda share: faults.pop() if faults and share.start == MAX_STEP_TOKENS else None
    with running_engine(runner, requests=together()) as running:
        running.wait_ended(*EIGHT)
        assert running.failure("r0").kind == "worker_fault"
        usages = [running.end(name).usage for name in EIGHT[1:]]
        assert sum(usage.computed_tokens for usage in usages) == len(PROMPT) - MAX_STEP_TOKENS + 6
        assert len({tuple(running.tokens(name)) for name in EIGHT[1:]}) == 1
        running.assert_nothing_is_held()
