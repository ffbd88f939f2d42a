"""The engine over a runner whose output shows every wrong reuse of a block."""

from __future__ import annotations

import logging
from functools import partial
from random import Random

import pytest

from prefixcache.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from prefixcache.protocol import End, Sampling, Started, StepEntry
from tests.support.engine_harness import OWNER, running_engine
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner, expected_output, made_up_logprobs, outputs_by_prompt
from tests.support.seeds import seeded
from worker.runner import StepShare

VOCABULARY = 1_000


def prompt_of(random: Random, length: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(length)]


def expected(prompt: list[int], num_tokens: int, sampling: Sampling | None = None) -> list[int]:
    return expected_output(prompt, num_tokens, vocab_size=VOCABULARY, sampling=sampling)


def test_one_request_from_submission_to_end() -> None:
    prompt = list(range(40))
    with running_engine() as running:
        assert running.submit(generate("a", prompt, max_tokens=5)) == 0
        end = running.end("a")
        assert running.tokens("a") == expected(prompt, 5)
        assert running.events["a"][0] == Started(id="a", cached_tokens=0)
        assert end.reason == "length"
        usage = end.usage
        assert (usage.cached_tokens, usage.computed_tokens, usage.output_tokens, usage.preemptions) == (0, 40, 5, 0)
        assert min(usage.queue_s, usage.prefill_s, usage.decode_s) >= 0
        running.assert_nothing_is_held()


def test_the_second_request_computes_only_what_the_first_did_not() -> None:
    prompt = list(range(100))
    with running_engine() as running:
        running.submit(generate("a", prompt))
        running.end("a")
        computed_before = running.runner.num_tokens
        running.submit(generate("b", [*prompt, 7, 8]))
        usage = running.end("b").usage
        assert running.started("b") == [Started(id="b", cached_tokens=96)]
        assert (usage.cached_tokens, usage.copied_tokens, usage.computed_tokens) == (96, 4, 2)
        assert running.runner.num_tokens - computed_before == 2 + 3
        assert running.tokens("b") == expected([*prompt, 7, 8], 4)


def test_the_output_of_a_turn_is_reused_by_the_next() -> None:
    prompt = list(range(20))
    with running_engine() as running:
        running.submit(generate("a", prompt, max_tokens=30))
        running.end("a")
        longer = [*prompt, *running.tokens("a"), 5]
        running.submit(generate("b", longer))
        assert running.end("b").usage.cached_tokens == 48


def test_another_root_shares_nothing() -> None:
    prompt = list(range(50))
    with running_engine() as running:
        running.submit(generate("a", prompt, root=1))
        running.end("a")
        running.submit(generate("b", prompt, root=2))
        assert running.end("b").usage.cached_tokens == 0
        running.submit(generate("c", prompt, root=2))
        assert running.end("c").usage.cached_tokens == 48


def test_a_stop_id_ends_the_answer_and_is_its_last_token() -> None:
    runner = ScriptedRunner(script=outputs_by_prompt({(1, 2, 3): [50, 51, 9, 52]}))
    with running_engine(runner) as running:
        running.submit(generate("a", [1, 2, 3], max_tokens=10, stop_token_ids=[9]))
        end = running.end("a")
        assert (end.reason, end.usage.output_tokens) == ("stop", 3)
        assert running.tokens("a") == [50, 51, 9]


def test_a_continuation_goes_on_where_the_other_worker_stopped() -> None:
    prompt, sampling = list(range(30)), Sampling(seed=5, temperature=0.7)
    whole = expected(prompt, 8, sampling)
    with running_engine() as running:
        running.submit(generate("a", prompt, output=whole[:3], max_tokens=8, sampling=sampling))
        end = running.end("a")
        assert running.tokens("a") == whole[3:]
        entry = running.events["a"][1]
        assert getattr(entry, "index", None) == 3
        assert end.usage.output_tokens == 5


def test_log_probabilities_come_with_each_token_where_they_are_asked_for() -> None:
    sampling = Sampling(seed=0, temperature=0, top_logprobs=3)
    with running_engine() as running:
        running.submit(generate("a", [1, 2, 3], sampling=sampling))
        running.submit(generate("b", [1, 2, 3]))
        running.wait_ended("a", "b")
        told = [event.logprobs for event in running.events["a"] if isinstance(event, StepEntry)]
        assert told == [(made_up_logprobs(token, 3, vocab_size=VOCABULARY),) for token in running.tokens("a")]
        assert {event.logprobs for event in running.events["b"] if isinstance(event, StepEntry)} == {None}


def test_draws_depend_on_seed_and_index_not_on_the_company() -> None:
    sampling = Sampling(seed=77, temperature=1.0)
    with running_engine() as running:
        running.runner.pause()
        for name in "abc":
            running.submit(generate(name, list(range(30)), sampling=sampling))
        running.runner.resume()
        running.wait_ended("a", "b", "c")
        assert running.tokens("a") == running.tokens("b") == expected(list(range(30)), 4, sampling)


def test_several_requests_share_a_step_and_a_prefix_is_computed_once() -> None:
    shared = list(range(600))
    with running_engine() as running:
        running.runner.pause()
        for name in "abcd":
            running.submit(generate(name, [*shared, ord(name)]))
        running.runner.resume()
        running.wait_ended(*"abcd")
        usages = [running.end(name).usage for name in "abcd"]
        assert sum(usage.computed_tokens for usage in usages) == 601 + 3 * 9
        assert max(len(shares) for shares in running.runner.steps) == 4
        for name in "abcd":
            assert running.tokens(name) == expected([*shared, ord(name)], 4)


def test_refusals_are_raised_to_the_submitter_and_leave_no_trace() -> None:
    with running_engine() as running:
        with pytest.raises(InvalidRequest, match="token id 1000"):
            running.submit(generate("a", [1000]))
        assert running.engine.load.waiting == 0


def test_a_context_longer_than_all_blocks_is_not_promised() -> None:
    runner = ScriptedRunner(num_blocks=4, max_model_len=1_000)
    with running_engine(runner) as running:
        assert running.engine.limits.max_model_len == 64
        with pytest.raises(ContextLengthExceeded, match="context length of 64"):
            running.submit(generate("a", [1] * 61, max_tokens=4))
        running.submit(generate("b", [1] * 60, max_tokens=4))
        assert running.end("b").reason == "length"


def test_too_many_waiting_requests_are_turned_away() -> None:
    with running_engine(max_waiting=2) as running:
        running.runner.pause()
        running.submit(generate("a", [1]))
        running.runner.wait_until_held()
        assert [running.submit(generate(name, [1, 2])) for name in "bc"] == [0, 1]
        with pytest.raises(Overloaded, match="2 requests wait already, the limit is 2; try again in 1 s") as caught:
            running.submit(generate("d", [1]))
        assert caught.value.retry_after_s == 1
        running.runner.resume()
        running.wait_ended("a", "b", "c")
        assert running.submit(generate("d", [1])) == 0
        running.end("d")


def test_a_start_is_told_while_the_first_chunk_is_being_computed() -> None:
    with running_engine() as running:
        running.runner.pause()
        running.submit(generate("a", [1, 2]))
        running.wait_for(lambda: running.started("a"))
        assert running.outputs[-1].load.running == 1
        assert running.outputs[-1].load.waiting == 0
        assert running.ending("a") is None
        running.runner.resume()
        running.end("a")


# --- abort ------------------------------------------------------------------------------------------------


def test_a_waiting_request_can_be_aborted() -> None:
    with running_engine(ScriptedRunner(num_blocks=4)) as running:
        running.submit(generate("a", list(range(50)), max_tokens=10))
        running.runner.pause()
        running.submit(generate("b", [1] * 50, max_tokens=10))
        running.engine.abort(OWNER, "b")
        running.runner.resume()
        end = running.end("b")
        assert (end.reason, end.usage.output_tokens, end.usage.prefill_s) == ("aborted", 0, 0)
        assert running.started("b") == []
        assert running.end("a").reason == "length"


def test_a_running_request_can_be_aborted_and_its_blocks_stay_useful() -> None:
    prompt = list(range(64))
    with running_engine(ScriptedRunner(step_delay_s=0.001)) as running:
        running.submit(generate("a", prompt, max_tokens=4_000))
        running.wait_for(lambda: len(running.tokens("a")) >= 3)
        running.engine.abort(OWNER, "a")
        end = running.end("a")
        assert end.reason == "aborted"
        assert end.usage.output_tokens == len(running.tokens("a"))
        running.assert_nothing_is_held()
        running.submit(generate("b", prompt))
        assert running.end("b").usage.cached_tokens == 48


def test_abort_of_an_owner_ends_all_its_requests_and_nobody_elses() -> None:
    with running_engine() as running:
        running.runner.pause()
        running.engine.submit("other", generate("theirs", [1, 2]))
        for name in "abc":
            running.submit(generate(name, [ord(name)], max_tokens=2_000))
        running.engine.abort(OWNER)
        running.runner.resume()
        assert [running.end(name).reason for name in "abc"] == ["aborted"] * 3
        assert running.end("theirs").reason == "length"


def test_abort_of_an_unknown_request_is_passed_over() -> None:
    with running_engine() as running:
        running.engine.abort(OWNER, "nobody")
        running.submit(generate("a", [1]))
        assert running.end("a").reason == "length"


# --- random workloads against what a correct engine must deliver ------------------------------------------


def prompts_that_share_prefixes(random: Random, count: int, max_prompt: int) -> list[list[int]]:
    known: list[list[int]] = []
    for _ in range(count):
        base = random.choice(known)[: random.randrange(max_prompt)] if known else []
        rest = random.randrange(1, max(max_prompt - len(base), 2))
        known.append([*base, *prompt_of(random, rest)])
    return known


@pytest.mark.parametrize("num_blocks", [8, 12, 24])
@pytest.mark.parametrize("round_", range(2))
def test_random_workloads_give_exactly_the_uncached_output(num_blocks: int, round_: int) -> None:
    random = seeded(f"workload {num_blocks} {round_}")
    prompts = prompts_that_share_prefixes(random, 30, num_blocks * 8)
    with running_engine(ScriptedRunner(num_blocks=num_blocks)) as running:
        lengths = {}
        for number, prompt in enumerate(prompts):
            length = random.randrange(1, num_blocks * 16 - len(prompt) + 1)
            lengths[f"r{number}"] = min(length, 30)
            running.submit(generate(f"r{number}", prompt, max_tokens=lengths[f"r{number}"]))
        running.wait_ended(*lengths)
        for number, prompt in enumerate(prompts):
            assert running.tokens(f"r{number}") == expected(prompt, lengths[f"r{number}"])
            usage = running.end(f"r{number}").usage
            assert usage.cached_tokens <= (len(prompt) - 1) // 16 * 16
            reused = usage.cached_tokens + usage.copied_tokens
            assert reused < len(prompt)
            assert usage.preemptions or reused + usage.computed_tokens == len(prompt)
        running.assert_nothing_is_held()


def test_small_pools_really_preempt_and_evict() -> None:
    random = seeded("preemption")
    with running_engine(ScriptedRunner(num_blocks=8)) as running:
        for number in range(20):
            running.submit(generate(f"r{number}", prompt_of(random, 20), max_tokens=60))
        running.wait_ended(*(f"r{number}" for number in range(20)))
        usages = [running.end(f"r{number}").usage for number in range(20)]
        assert sum(usage.preemptions for usage in usages) > 0
        assert running.metrics.evictions._value.get() > 0
        assert running.metrics.preemptions._value.get() == sum(usage.preemptions for usage in usages)


@pytest.mark.parametrize("round_", range(3))
def test_aborts_and_faults_at_random_times_disturb_nobody_else(round_: int) -> None:
    random = seeded(f"disturbance {round_}")
    fault_random = Random(random.random())

    def share_fault(_share: StepShare) -> Exception | None:
        return RuntimeError("scripted") if fault_random.random() < 0.01 else None

    def step_fault(_number: int) -> Exception | None:
        return RuntimeError("scripted") if fault_random.random() < 0.02 else None

    runner = ScriptedRunner(num_blocks=16, share_fault=share_fault, step_fault=step_fault)
    logging.getLogger("worker.engine").setLevel(logging.CRITICAL)
    try:
        with running_engine(runner) as running:
            prompts = prompts_that_share_prefixes(random, 60, 100)
            lengths = [random.randrange(1, 40) for _ in prompts]
            for number, prompt in enumerate(prompts):
                running.submit(generate(f"r{number}", prompt, max_tokens=lengths[number]))
                if random.random() < 0.3:
                    running.engine.abort(OWNER, f"r{random.randrange(number + 1)}")
                if random.random() < 0.2:
                    running.wait_for(partial(running.events.get, f"r{random.randrange(number + 1)}"))
            running.wait_ended(*(f"r{number}" for number in range(len(prompts))))
            for number, prompt in enumerate(prompts):
                truth, tokens = expected(prompt, lengths[number]), running.tokens(f"r{number}")
                ending = running.ending(f"r{number}")
                is_whole = isinstance(ending, End) and ending.reason == "length"
                assert tokens == (truth if is_whole else truth[: len(tokens)])
            running.assert_nothing_is_held()
    finally:
        logging.getLogger("worker.engine").setLevel(logging.NOTSET)
