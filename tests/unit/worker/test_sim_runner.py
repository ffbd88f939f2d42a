"""The simulated engine: text that shows every wrong reuse, time as the cost model says, blocks that run out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefixcache.errors import ConfigError, WorkerFault
from prefixcache.protocol import Sampling
from prefixcache.rendering.byte_tokenizer import BYTE_STOP_ID
from tests.support.engine_harness import running_engine
from tests.support.manual_clock import ManualClock
from tests.support.requests import GREEDY, generate, sample_spec
from tests.support.seeds import seeded
from worker.runner import Drawn, StepShare
from worker.sim_costs import CostModel
from worker.sim_runner import DEFAULT_MAX_MODEL_LEN, ForcedTokens, SimRunner

AT_ONCE = CostModel(speed=float("inf"))
PROMPT = [*b"Once upon a time there was a river that nobody had a name for, and a road along it. What then?"]
STOP = (BYTE_STOP_ID,)


def fast(num_blocks: int = 256, forced: ForcedTokens | None = None) -> SimRunner:
    return SimRunner(costs=AT_ONCE, num_blocks=num_blocks, forced=forced)


def share(token_ids: list[int], *, start: int = 0, table: range = range(8)) -> StepShare:
    spec = sample_spec(prompt=token_ids)
    return StepShare(token_ids=token_ids, start=start, block_table=table, sample=spec)


def answers(
    requests: dict[str, list[int]], *, sampling: Sampling = GREEDY, num_blocks: int = 256
) -> dict[str, list[int]]:
    """The outputs of all requests, in flight together."""
    with running_engine(fast(num_blocks)) as running:
        for name, prompt in requests.items():
            running.submit(generate(name, prompt, max_tokens=80, stop_token_ids=STOP, sampling=sampling))
        running.wait_ended(*requests)
        assert {running.end(name).reason for name in requests} <= {"stop", "length"}
        running.assert_nothing_is_held()
        return {name: running.tokens(name) for name in requests}


def text_of(tokens: list[int]) -> str:
    return bytes([token for token in tokens if token < 256]).decode("ascii")


# --- text -------------------------------------------------------------------------------------------------


def test_cached_equals_uncached() -> None:
    with running_engine(fast()) as running:
        for name in ("cold", "cached"):
            running.submit(generate(name, PROMPT, max_tokens=60, stop_token_ids=STOP))
            running.wait_ended(name)
        assert running.end("cold").usage.cached_tokens == 0
        assert running.end("cached").usage.cached_tokens == (len(PROMPT) - 1) // 16 * 16
        assert running.tokens("cached") == running.tokens("cold")
        running.assert_nothing_is_held()


def test_requests_in_flight_together_get_what_they_get_alone() -> None:
    random = seeded("sim runner")
    requests = {f"r{n}": [*PROMPT[: random.randrange(1, len(PROMPT))], 65 + n] for n in range(8)}
    together = answers(requests)
    for name, prompt in requests.items():
        assert together[name] == answers({name: prompt})[name]


def test_few_blocks_preempt_and_change_no_text() -> None:
    requests = {f"r{n}": [*b"question %d" % n] for n in range(12)}
    assert answers(requests, num_blocks=14) == answers(requests)


def test_the_cut_into_chunks_changes_no_text() -> None:
    long = PROMPT * 6  # two chunks
    alone = answers({"a": long}, num_blocks=64)["a"]
    assert answers({"b": [*b"another"], "a": long}, num_blocks=64)["a"] == alone


def test_a_wrong_block_changes_the_text() -> None:
    after = StepShare(
        token_ids=[9],
        start=16,
        block_table=range(2),
        sample=sample_spec(Sampling(seed=0, temperature=0, top_logprobs=3)),
    )

    def drawn_after(first: int) -> Drawn | Exception | None:
        runner = fast()
        runner.execute([share([first] * 16)])
        [result] = runner.execute([after])
        assert isinstance(result, Drawn)
        return result

    assert drawn_after(1) == drawn_after(1)
    assert drawn_after(1) != drawn_after(2)


def test_a_block_that_was_never_computed_fails_its_share_alone() -> None:
    results = fast().execute([share([9], start=16, table=range(2)), share([9], table=range(3, 4))])
    assert isinstance(results[0], WorkerFault)
    assert isinstance(results[1], Drawn)


def test_a_chunk_that_is_not_the_last_draws_nothing() -> None:
    chunk = StepShare(token_ids=[1] * 16, start=0, block_table=[0], sample=None)
    assert fast().execute([chunk]) == [None]


def test_seeds_give_different_texts_and_each_of_them_again() -> None:
    def sampled(seed: int) -> str:
        return text_of(answers({"a": PROMPT}, sampling=Sampling(seed=seed))["a"])

    texts = [sampled(seed) for seed in range(6)]
    assert len(set(texts)) == 6
    assert texts == [sampled(seed) for seed in range(6)]
    assert all(text.isprintable() for text in texts)


def test_forced_tokens_are_drawn() -> None:
    forced: list[int] = [*b"Paris", BYTE_STOP_ID]
    seen: list[list[int]] = []

    def script(prompt: Sequence[int], index: int) -> int | None:
        seen.append(list(prompt))
        return forced[index]

    with running_engine(fast(forced=script)) as running:
        running.submit(generate("a", PROMPT, max_tokens=60, stop_token_ids=STOP))
        assert running.end("a").reason == "stop"
        assert running.tokens("a") == forced
        running.assert_nothing_is_held()
    assert seen == [PROMPT] * len(forced)


def test_forcing_nothing_leaves_the_token_to_the_model() -> None:
    free = answers({"a": PROMPT})["a"]
    with running_engine(fast(forced=lambda _prompt, _index: None)) as running:
        running.submit(generate("a", PROMPT, max_tokens=80, stop_token_ids=STOP))
        running.wait_ended("a")
        assert running.tokens("a") == free


# --- time -------------------------------------------------------------------------------------------------


class Sleeper:
    """Time that passes only where it is spent."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.now += seconds


def test_a_step_takes_what_it_costs() -> None:
    sleeper = Sleeper()
    costs = CostModel()
    runner = SimRunner(costs=costs, clock=sleeper.clock, sleep=sleeper.sleep)
    chunk, token = share([1] * 100), share([1], start=100)
    runner.execute([chunk])
    runner.execute([token])
    assert sleeper.slept == pytest.approx([costs.step_s([chunk]), costs.step_s([token])])


def test_the_time_of_the_work_itself_counts() -> None:
    sleeper = Sleeper()

    def slow(_prompt: object, _index: int) -> int:
        sleeper.clock.now += 0.004
        return 65

    costs = CostModel(step_ms=10, prefill_us=0)
    runner = SimRunner(costs=costs, clock=sleeper.clock, sleep=sleeper.sleep, forced=slow)
    runner.execute([share([1] * 20)])
    assert sleeper.slept == pytest.approx([0.006])
    runner.execute([share([1] * 20)] * 3)
    assert len(sleeper.slept) == 1, "work that takes longer than the cost is not slept on top"


@pytest.mark.parametrize(
    ("start", "late_s", "sleeps_s"),
    [(20, 0.002, 0.008), (20, 0.1, 0.010), (0, 0.002, 0.010)],
    ids=["goes on", "goes on after a long delay", "another sequence"],
)
def test_steps_that_go_on_take_what_they_cost_together(start: int, late_s: float, sleeps_s: float) -> None:
    sleeper = Sleeper()
    runner = SimRunner(costs=CostModel(step_ms=10, prefill_us=0, speed=1), clock=sleeper.clock, sleep=sleeper.sleep)
    runner.execute([share([1] * 20)])
    sleeper.clock.now += late_s
    runner.execute([share([1] * 20, start=start)])
    assert sleeper.slept == pytest.approx([0.010, sleeps_s])


# --- limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "limit"),
    [(16, None, 256), (16, 256, 256), (16, 100, 100), (100_000, None, DEFAULT_MAX_MODEL_LEN)],
)
def test_how_long_a_sequence_may_become(num_blocks: int, max_model_len: int | None, limit: int) -> None:
    limits = SimRunner(costs=AT_ONCE, num_blocks=num_blocks, max_model_len=max_model_len).limits
    assert (limits.num_blocks, limits.max_model_len, limits.vocab_size) == (num_blocks, limit, 259)


def test_more_than_the_blocks_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="maximum model length 257 is over the 256 tokens that 16 KV blocks hold"):
        SimRunner(costs=AT_ONCE, num_blocks=16, max_model_len=257)
