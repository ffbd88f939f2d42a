"""Both engines: when pieces and answers end, and that steps in closed form are steps one by one."""

from __future__ import annotations

import random

import pytest

from prefixcache.errors import ConfigError
from prefixcache.simulation.costs import PrefillCosts, StepCosts
from prefixcache.simulation.engine import NEVER, Engine
from prefixcache.simulation.job import Job
from prefixcache.simulation.prefill_server import PrefillServer
from prefixcache.simulation.step_engine import StepEngine
from tests.support.seeds import seeded
from tests.unit.prefixcache.simulation.traces import request
from worker.runner import StepShare
from worker.sim_costs import CostModel


def _job(number: int, prompt_blocks: int = 2, output: int = 10) -> Job:
    return Job(request(range(prompt_blocks), output=output), number=number, arrived_at=0.0, proxy=0)


def test_prefills_take_their_tokens_and_an_overhead() -> None:
    engine = PrefillServer(PrefillCosts(prefill_rate=1_000.0, overhead_s=0.5, inter_token_s=0.1))
    job = _job(1, output=20)
    assert engine.next_at == NEVER
    engine.prefill(job, 2_000, 10.0)
    assert engine.next_at == engine.prefill_ends_at == 12.5
    progress = engine.advance(12.5)
    assert (progress.prefilled, progress.prefill_s, list(progress.decoded)) == (job, 2.5, [])
    engine.decode(job, 12.5)
    other = _job(2)
    engine.prefill(other, 5_000, 12.5)
    assert (engine.next_at, engine.generated_tokens(job, 13.5)) == (14.5, 10)
    assert list(engine.advance(14.5).decoded) == [job]
    assert (engine.next_at, engine.decoding(), engine.busy_s) == (18.0, [], 2.5)


def test_a_step_costs_what_a_simulated_worker_says() -> None:
    chance = seeded("step costs")
    terms = {
        "prefill_us": 90.0,
        "step_ms": 2.0,
        "itl_ms": 7.0,
        "itl_per_sequence_ms": 0.3,
        "itl_per_1k_context_ms": 0.2,
        "speed": 3.0,
    }
    costs, model = StepCosts(**terms), CostModel(**terms)  # type: ignore[arg-type]  # step_tokens is left as it is
    assert StepCosts() == StepCosts(**{name: getattr(CostModel(), name) for name in terms})
    for _ in range(50):
        contexts = [chance.randint(1, 5_000) for _ in range(chance.randint(0, 30))]
        chunk = chance.choice([0, chance.randint(2, 512)])
        decodes = [StepShare(token_ids=(1,), start=context - 1, block_table=(), sample=None) for context in contexts]
        prefill = [StepShare(token_ids=(1,) * chunk, start=0, block_table=(), sample=None)] if chunk else []
        expected = model.step_s([*decodes, *prefill])
        assert costs.cost_s(chunk, len(contexts), sum(contexts)) == pytest.approx(expected)


class SingleSteps:
    """The same engine, step by step."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.now = 0.0
        self.left: dict[Job, int] = {}
        self.context: dict[Job, int] = {}

    def run(self, arrivals: list[tuple[float, Job, int]]) -> dict[tuple[str, int], float]:
        """Ends of pieces and answers, by the job's number."""
        ends: dict[tuple[str, int], float] = {}
        waiting = list(arrivals)
        prefill: tuple[Job, int] | None = None
        while waiting or prefill or self.left:
            if prefill is None and waiting and (waiting[0][0] <= self.now or not self.left):
                at, job, tokens = waiting.pop(0)
                self.now = max(self.now, at)
                prefill = (job, tokens)
            chunk = min(self.costs.step_tokens - len(self.left), prefill[1]) if prefill else 0
            self.now += self.costs.cost_s(chunk, len(self.left), sum(self.context.values()))
            for job in list(self.left):
                self.left[job] -= 1
                self.context[job] += 1
                if self.left[job] <= 0:
                    ends["answer", job.number] = self.now
                    del self.left[job], self.context[job]
            if prefill:
                prefill = (prefill[0], prefill[1] - chunk)
                if not prefill[1]:
                    job, prefill = prefill[0], None
                    ends["prefill", job.number] = self.now
                    if job.output_tokens > 1:
                        self.left[job], self.context[job] = job.output_tokens - 1, job.prompt_tokens + 1
                    else:
                        ends["answer", job.number] = self.now
        return ends


def _run(engine: Engine, arrivals: list[tuple[float, Job, int]]) -> dict[tuple[str, int], float]:
    ends: dict[tuple[str, int], float] = {}
    waiting, is_prefilling = list(arrivals), False
    now = 0.0
    while waiting or engine.next_at != NEVER:
        if not is_prefilling and waiting and waiting[0][0] <= max(now, min(engine.next_at, waiting[0][0])):
            at, job, tokens = waiting.pop(0)
            now = max(now, at)
            engine.prefill(job, tokens, now)
            is_prefilling = True
            continue
        now = engine.next_at
        progress = engine.advance(now)
        for job in progress.decoded:
            ends["answer", job.number] = now
        if progress.prefilled is not None:
            is_prefilling = False
            ends["prefill", progress.prefilled.number] = now
            engine.decode(progress.prefilled, now)
    return ends


def test_steps_in_closed_form_are_steps_one_by_one() -> None:
    chance = seeded("steps")
    for _ in range(60):
        costs = StepCosts(itl_per_1k_context_ms=chance.choice([0.0, 5.0]), step_ms=chance.choice([0.0, 1.0]))
        arrivals = _arrivals(chance)
        expected = SingleSteps(costs).run(arrivals)
        assert _run(StepEngine(costs), arrivals) == pytest.approx(expected, abs=1e-6)


def _arrivals(chance: random.Random) -> list[tuple[float, Job, int]]:
    at = 0.0
    arrivals: list[tuple[float, Job, int]] = []
    for number in range(chance.randint(1, 12)):
        at += chance.choice([0.0, 0.05, chance.expovariate(2.0)])
        job = _job(number, prompt_blocks=chance.randint(1, 20), output=chance.randint(0, 60))
        arrivals.append((at, job, chance.randint(2, job.prompt_tokens)))
    return arrivals


def test_what_a_dead_engine_has_generated() -> None:
    engine = StepEngine(StepCosts(itl_ms=9.0, itl_per_sequence_ms=0.0, itl_per_1k_context_ms=0.0))
    job = _job(1, output=50)
    engine.prefill(job, 512, 0.0)
    now = engine.next_at
    engine.advance(now)
    engine.decode(job, now)
    assert engine.decoding() == [job]
    assert engine.generated_tokens(job, now) == 1
    assert engine.next_at == pytest.approx(now + 49 * 0.010)


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        (lambda: PrefillCosts(prefill_rate=0.0), "prefill rate is 0.0"),
        (lambda: PrefillCosts(prefill_rate=1.0, inter_token_s=-1.0), "inter-token latency is -1.0"),
        (lambda: StepCosts(speed=float("inf")), "speed is inf"),
        (lambda: StepCosts(itl_ms=-1.0), "itl_ms is -1.0"),
        (lambda: StepCosts(prefill_us=0.0, step_ms=0.0), "take no time"),
    ],
)
def test_costs_that_are_none(costs: object, told: str) -> None:
    assert callable(costs)
    with pytest.raises(ConfigError, match=told):
        costs()
