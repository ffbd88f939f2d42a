"""Runs of whole traces: nothing is lost, the same seed is the same run, and each mechanism does what it is for."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import replace

import pytest

from prefixcache.errors import ConfigError
from prefixcache.simulation.costs import Costs, PrefillCosts, StepCosts
from prefixcache.simulation.fleet import Fleet
from prefixcache.simulation.lru import LruCache
from prefixcache.simulation.mechanisms import ALL, NONE, Mechanisms
from prefixcache.simulation.outcome import Outcome, outcome
from prefixcache.simulation.policies import NAMES, new_fleet
from prefixcache.simulation.scenario import Kill, Scenario
from prefixcache.simulation.trace import Trace
from tests.support.seeds import seeded
from tests.unit.prefixcache.simulation.traces import BLOCK, chains, chats, coding, request, trace

COSTS = PrefillCosts(prefill_rate=4_000.0)
SCENARIO = Scenario(num_workers=4, capacity_blocks=200, costs=COSTS)


def _ran(
    name: str, of: Trace, scenario: Scenario = SCENARIO, mechanisms: Mechanisms | None = None, *, seed: int = 1
) -> Fleet:
    fleet = new_fleet(name, of, scenario, mechanisms, seed=seed)
    fleet.run()
    return fleet


def _check_all_done(fleet: Fleet) -> None:
    assert len(fleet.first_tokens) == len(fleet.trace.requests)
    assert {id(job.request) for job in fleet.first_tokens} == {id(each) for each in fleet.trace.requests}
    assert all(job.ttft_s is not None and job.ttft_s > 0 for job in fleet.first_tokens)
    for worker in fleet.workers:
        assert not worker.waiting and worker.prefilling is None and not worker.sliced
        if not worker.is_dead:
            assert worker.is_idle and not worker.engine.decoding()
            snapshot = worker.snapshot(0, fleet.ended_at + 100.0)
            assert (snapshot.num_waiting, snapshot.num_running, snapshot.running_tokens) == (0, 0, 0)
            assert sum(snapshot.waiting_s) == 0.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("costs", [COSTS, StepCosts()], ids=["prefills", "steps"])
def test_every_request_gets_its_first_token(name: str, costs: Costs) -> None:
    for each in (chats(), coding()):
        fleet = _ran(name, each, replace(SCENARIO, costs=costs))
        _check_all_done(fleet)


def test_nor_is_one_lost_in_a_tight_cache_behind_proxies_that_know_little() -> None:
    scenario = replace(
        SCENARIO,
        capacity_blocks=90,
        num_proxies=3,
        event_lag_s=5.0,
        load_lag_s=2.0,
        rate_error=0.5,
        kills=(Kill(worker=2, at_s=40.0), Kill(worker=1, at_s=41.0), Kill(worker=2, at_s=42.0)),
    )
    for each in (chats(), coding()):
        for costs in (COSTS, StepCosts()):
            fleet = _ran("eta", each, replace(scenario, costs=costs))
            _check_all_done(fleet)
            assert [worker.is_dead for worker in fleet.workers] == [True, True, False, False]


@pytest.mark.parametrize("name", ["eta", "sglang_tree", "pooled_slices"])
def test_the_same_seed_is_the_same_run(name: str) -> None:
    scenario = replace(SCENARIO, num_proxies=2, rate_error=0.3)
    runs = [outcome(_ran(name, coding(), scenario, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    if name == "eta":
        assert runs[0] != runs[2]


def test_one_worker_is_a_queue_and_a_cache() -> None:
    """What a loop of ten lines says of it."""
    chance = seeded("one worker")
    workload = chains(chance, 60, longest=12)
    at, requests = 0.0, []
    for _ in range(200):
        at += chance.expovariate(2.0)
        requests.append(request(chance.choice(workload), at=at, rest=chance.randint(0, 500)))
    made = trace(*requests)
    fleet = _ran("round_robin", made, replace(SCENARIO, num_workers=1, capacity_blocks=40))
    cache, free_at, hits, ttfts = LruCache(40), 0.0, 0, []
    for each in requests:
        depth = cache.depth(each.blocks, each.reusable_blocks)
        cache.hold(each.blocks)
        cache.release(each.blocks, 0.0)
        hits += depth * BLOCK
        free_at = max(free_at, each.arrival_s) + (each.prompt_tokens - depth * BLOCK) / 4_000.0 + 0.020
        ttfts.append(free_at - each.arrival_s)
    assert [job.ttft_s for job in fleet.first_tokens] == pytest.approx(ttfts)
    assert outcome(fleet).hit_rate == pytest.approx(hits / made.prompt_tokens)


def test_round_robin_is_as_many_queues() -> None:
    requests = [request((n,), at=0.1 * n, rest=100 * (n % 7)) for n in range(60)]
    fleet = _ran("round_robin", trace(*requests), replace(SCENARIO, num_workers=3))
    free: list[float] = [0.0] * 3
    expected = []
    for number, each in enumerate(requests):
        worker = number % 3
        free[worker] = max(free[worker], each.arrival_s) + each.prompt_tokens / 4_000.0 + 0.020
        expected.append(free[worker] - each.arrival_s)
    by_number = sorted(fleet.first_tokens, key=lambda job: job.number)
    assert [job.ttft_s for job in by_number] == pytest.approx(expected)


def test_the_bound_is_one_cache_and_work_for_whoever_is_free_first() -> None:
    requests = [request((n % 5, 10 + n % 5), at=0.05 * n, rest=500 + 300 * (n % 4)) for n in range(80)]
    fleet = _ran("pooled", trace(*requests), replace(SCENARIO, num_workers=3))
    free = [0.0] * 3
    cache = LruCache(600)
    expected = []
    for each in requests:
        began = max(heapq.heappop(free), each.arrival_s)
        depth = cache.depth(each.blocks, each.reusable_blocks)
        cache.hold(each.blocks)
        cache.release(each.blocks, 0.0)
        heapq.heappush(free, began + (each.prompt_tokens - depth * BLOCK) / 4_000.0 + 0.020)
        expected.append(began + (each.prompt_tokens - depth * BLOCK) / 4_000.0 + 0.020 - each.arrival_s)
    # Requests are bound to a worker when they come, by an estimate: not one by one the same, but all in all.
    assert outcome(fleet).ttft_mean_s == pytest.approx(sum(expected) / len(expected), rel=0.1)
    assert outcome(fleet).hit_rate == pytest.approx(2 * 75 * BLOCK / fleet.trace.prompt_tokens, abs=0.01)


def test_a_session_goes_on_when_its_last_answer_has_ended() -> None:
    made = trace(
        request((1,), at=5.0, output=100, session=7),
        request((1, 2), at=6.0, session=7, think_s=3.0),
        request((9,), at=6.5, session=8),
    )
    fleet = _ran("round_robin", made)
    first, second = sorted((job for job in fleet.first_tokens if job.request.session == 7), key=lambda job: job.number)
    assert first.arrived_at == 5.0 and first.ttft_s is not None
    assert second.arrived_at == pytest.approx(5.0 + first.ttft_s + 100 * 0.025 + 3.0)


def test_equal_prompts_at_once_meet_by_pending_claims() -> None:
    made = trace(*(request(range(40), at=0.001 * n) for n in range(8)))
    with_claims = outcome(_ran("longest_prefix", made, mechanisms=replace(NONE, pending=True)))
    assert with_claims.hit_rate == pytest.approx(7 / 8, abs=0.01)
    assert outcome(_ran("longest_prefix", made)).hit_rate < 0.6


def test_an_idle_worker_is_given_what_waits_elsewhere() -> None:
    """All prompts begin alike and go to one worker by their prefix; others take the long ones over."""
    requests = [request((0, *range(100 * n, 100 * n + 30)), at=10.0 + 0.01 * n) for n in range(1, 9)]
    made = trace(request((0,)), *requests)
    mechanisms = replace(NONE, pending=True)
    kept, moved = (_ran("longest_prefix", made, mechanisms=replace(mechanisms, steal=steal)) for steal in (False, True))
    assert (kept.num_steals, sum(worker.work_by_minute.total() > 0 for worker in kept.workers)) == (0, 1)
    assert moved.num_steals >= 3 and all(worker.work_by_minute.total() for worker in moved.workers)
    assert outcome(moved).ttft_mean_s < 0.5 * outcome(kept).ttft_mean_s


def test_what_a_dead_worker_had_is_done_by_others_and_nobody_asks_it_again() -> None:
    scenario = replace(SCENARIO, num_workers=2, kills=(Kill(worker=1, at_s=10.0),))
    requests = [request(range(100 * n, 100 * n + 20), at=1.0 * n, output=400) for n in range(20)]
    fleet = _ran("round_robin", trace(*requests), scenario)
    _check_all_done(fleet)
    dead, alive = fleet.workers
    assert set(dead.work_by_minute) == {0}
    assert alive.work_by_minute.total() > 20 * 10 * BLOCK
    # One that had its first token keeps it, and is not counted twice.
    assert fleet.first_tokens[0].ttft_s == pytest.approx((20 * BLOCK + 100) / 4_000.0 + 0.020)


def test_several_proxies_see_less() -> None:
    """Decisions on old loads cost something; on the same trace one proxy does better."""
    made = chats()
    scenario = replace(SCENARIO, load_lag_s=5.0, costs=PrefillCosts(prefill_rate=20_000.0))

    def mean_s(num_proxies: int) -> float:
        runs = [_ran("least_ttft", made, replace(scenario, num_proxies=num_proxies), seed=seed) for seed in range(3)]
        return sum(outcome(run).ttft_mean_s for run in runs)

    assert mean_s(1) < mean_s(8)


def test_each_mechanism_is_worth_something_on_coding_sessions() -> None:
    """In the order in which they are said to: all of them are better than routing alone, by a lot."""
    scenario = replace(SCENARIO, num_workers=2, capacity_blocks=260, costs=PrefillCosts(prefill_rate=1_500.0))

    def result(mechanisms: Mechanisms) -> Outcome:
        return outcome(_ran("eta", coding(), scenario, mechanisms))

    alone, with_all = result(replace(NONE, pending=True)), result(ALL)
    assert with_all.ttft_p50_s < alone.ttft_p50_s
    assert with_all.hit_rate > alone.hit_rate
    assert with_all.slices > 0 and alone.slices == 0


def test_a_name_that_is_no_policy() -> None:
    with pytest.raises(ConfigError, match="no policy is called 'best'; there are eta, "):
        new_fleet("best", chats(), SCENARIO, None, seed=1)


def test_seeds_spread_what_is_drawn() -> None:
    """Report phases and rate errors differ from worker to worker."""
    fleet = new_fleet("eta", chats(), replace(SCENARIO, rate_error=0.5), None, seed=3)
    drawn = defaultdict(set)
    for worker in fleet.workers:
        drawn["phase"].add(worker._phase_s)
        drawn["rate"].add(worker._rate_factor)
    assert all(len(values) == 4 for values in drawn.values())
    again = new_fleet("eta", chats(), replace(SCENARIO, rate_error=0.5), None, seed=3)
    assert {worker._phase_s for worker in again.workers} == drawn["phase"]
