"""A simulated worker beside the worker's own scheduler and block pool, both in virtual time with the same costs."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from prefixcache.protocol import Generate, Sampling
from prefixcache.routing.prefill_rate import PrefillRate
from prefixcache.simulation.costs import StepCosts
from prefixcache.simulation.outcome import outcome, percentile
from prefixcache.simulation.policies import new_fleet
from prefixcache.simulation.scenario import Scenario
from prefixcache.simulation.trace import Trace, TraceRequest
from prefixcache.simulation.worker import FORGOTTEN_TOKENS
from tests.unit.prefixcache.simulation.traces import BLOCK, chats, coding
from worker import pace
from worker.block_pool import BlockPool
from worker.runner import RunnerLimits
from worker.scheduler import Scheduler
from worker.sequence import Sequence as Generating
from worker.step_costs import ChunkCost
from worker.step_plan import StepPlan

KV_BLOCK = 64
"""Larger than the worker's own: a quarter of the time, and as exact."""
VOCABULARY = 50_000


class RealWorker:
    """Scheduler, block pool and sequences of `worker/`, without thread and clock."""

    def __init__(self, capacity_blocks: int, costs: StepCosts) -> None:
        self.costs = costs
        self.limits = RunnerLimits(
            block_size=KV_BLOCK,
            num_blocks=capacity_blocks * BLOCK // KV_BLOCK,
            max_model_len=10**7,
            vocab_size=VOCABULARY,
            kv_bytes_per_token=4,
        )
        self.scheduler = Scheduler(BlockPool(self.limits.num_blocks, stride=4), block_size=KV_BLOCK)
        self.rate = PrefillRate(forgotten_tokens=pace.FORGOTTEN_TOKENS)
        self.now = 0.0
        self.ttfts: list[float] = []
        self.cached_tokens = 0

    def run(self, trace: Trace) -> None:
        waiting = list(enumerate(trace.requests))
        while waiting or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, waiting[0][1].arrival_s)
            while waiting and waiting[0][1].arrival_s <= self.now:
                self._add(*waiting.pop(0))
            plan = self.scheduler.schedule(
                now=self.now,
                prefill_rate=self.rate.tokens_per_s,
                chunk_cost=ChunkCost(token_s=self.costs.prefill_us / 1e6 / self.costs.speed, pair_s=0.0),
            )
            assert plan.shares
            self._compute(plan)

    def _add(self, number: int, request: TraceRequest) -> None:
        """Tokens that are alike where blocks are, and nowhere else."""
        tokens = array("I")
        for block in request.blocks:
            of_block = random.Random(block)
            tokens.extend([of_block.randrange(VOCABULARY) for _ in range(KV_BLOCK)] * (BLOCK // KV_BLOCK))
        rest = random.Random(f"rest {number}")
        tokens.extend(rest.randrange(VOCABULARY) for _ in range(request.prompt_tokens - len(tokens)))
        asked = Generate(
            id=str(number),
            root=7,
            prompt_ids=tokens.tobytes(),
            sampling=Sampling(seed=1),
            max_tokens=max(request.output_tokens, 1),
        )
        self.scheduler.add(Generating("proxy", asked, self.limits, arrived_at=request.arrival_s))

    def _compute(self, plan: StepPlan) -> None:
        work = plan.work()
        step_s = self.costs.cost_s(work.chunk_tokens, work.num_decodes, work.context_tokens)
        self.now += step_s
        self.rate.observe(tokens=work.chunk_tokens, seconds=step_s)
        for share in plan.shares:
            sequence = share.sequence
            draws = share.num_tokens == sequence.num_uncomputed_tokens
            self.scheduler.advance(share)
            if draws:
                if sequence.first_token_at is None:
                    sequence.first_token_at = self.now
                    self.ttfts.append(self.now - sequence.arrived_at)
                    self.cached_tokens += sequence.cached_tokens
                drawn = random.Random(f"{sequence.id} {sequence.num_output_tokens}").randrange(VOCABULARY)
                if sequence.append(drawn) is not None:
                    self.scheduler.finish(sequence)


def _open_loop(trace: Trace, speed: float, *, longest_answer: int) -> Trace:
    """Without sessions, and with short answers."""
    requests = [
        replace(each, session=None, output_tokens=min(each.output_tokens, longest_answer)) for each in trace.requests
    ]
    return replace(trace, requests=requests).faster(speed)


@pytest.mark.parametrize(
    ("trace", "speeds", "longest_answer", "capacity_blocks", "costs"),
    [
        (chats(), (0.1,), 300, 600, StepCosts(prefill_us=100.0)),
        (chats(), (0.1,), 300, 600, StepCosts(prefill_us=120.0, itl_ms=20.0)),
        (coding(), (0.44, 0.5, 0.56), 40, 700, StepCosts(prefill_us=100.0)),
        # Prompts of thousands of KV blocks that are nearly all there must not be taken for long prefills.
        (coding(), (0.5,), 1, 2_000, StepCosts(prefill_us=100.0)),
    ],
    ids=["chats", "chats, slow decode", "coding, little room", "coding, no decodes"],
)
def test_they_agree(
    trace: Trace, speeds: Sequence[float], longest_answer: int, capacity_blocks: int, costs: StepCosts
) -> None:
    """In hit rate within two points, in the mean within 10 %, in percentiles within 20 %.

    With little room one request that goes before another decides what is evicted, so that several runs are taken.
    """
    theirs: list[Sequence[float]] = []
    ours: list[Sequence[float]] = []
    for speed in speeds:
        replayed = _open_loop(trace, speed, longest_answer=longest_answer)
        theirs.append(_real(replayed, capacity_blocks, costs))
        scenario = Scenario(num_workers=1, capacity_blocks=capacity_blocks, costs=costs)
        fleet = new_fleet("eta", replayed, scenario, None, seed=1)
        fleet.run()
        got = outcome(fleet)
        ours.append((got.hit_rate, got.ttft_mean_s, got.ttft_p50_s, got.ttft_p90_s, got.ttft_p99_s))
    hit_rate, mean_s, *percentiles_s = map(fmean, zip(*ours, strict=True))
    real_hit_rate, real_mean_s, *real_percentiles_s = map(fmean, zip(*theirs, strict=True))
    assert hit_rate == pytest.approx(real_hit_rate, abs=0.02)
    assert mean_s == pytest.approx(real_mean_s, rel=0.1)
    assert percentiles_s == pytest.approx(real_percentiles_s, rel=0.2)


def _real(trace: Trace, capacity_blocks: int, costs: StepCosts) -> Sequence[float]:
    """Hit rate; mean, p50, p90 and p99 of the times to the first token."""
    worker = RealWorker(capacity_blocks, costs)
    worker.run(trace)
    ttfts = sorted(worker.ttfts)
    assert len(ttfts) == len(trace.requests)
    percentiles = (percentile(ttfts, share) for share in (0.5, 0.9, 0.99))
    return worker.cached_tokens / trace.prompt_tokens, fmean(ttfts), *percentiles


def test_rates_are_learnt_as_the_worker_learns_them() -> None:
    assert FORGOTTEN_TOKENS == pace.FORGOTTEN_TOKENS
