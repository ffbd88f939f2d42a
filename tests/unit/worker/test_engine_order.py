"""The engine's order, slices, late aborts and predictions, on a clock that only steps move: 1,000 tokens a second."""

from __future__ import annotations

from functools import partial

import pytest

from prefixcache.errors import Overloaded
from prefixcache.limits import MAX_STEP_TOKENS
from prefixcache.protocol import End, Started
from prefixcache.routing.order import Order
from prefixcache.routing.slices import MOST_COMPUTED, slice_tokens
from tests.support.engine_harness import OWNER, RunningEngine, running_engine
from tests.support.requests import generate
from tests.support.scripted_runner import expected_output
from tests.support.seeds import seeded
from tests.support.timed_runner import TimedRunner

VOCABULARY = 1_000


def prompt(first: int, length: int) -> list[int]:
    """Shares no block with a prompt from another first id."""
    return [first, *([7] * (length - 1))]


def warm(running: RunningEngine) -> None:
    """Lets the engine measure its speed."""
    running.submit(generate("warm", prompt(0, 512), max_tokens=1))
    running.end("warm")
    running.assert_nothing_is_held()


def hold_with(running: RunningEngine, request_id: str = "held", length: int = 512) -> None:
    """A request whose step waits until the runner may go on; what is submitted meanwhile waits."""
    running.runner.pause()
    running.submit(generate(request_id, prompt(1, length), max_tokens=1))
    running.runner.wait_until_held()


def starts(running: RunningEngine) -> list[str]:
    """Names in the order in which they were started."""
    events = [event for output in running.outputs for _owner, event in output.events]
    return [event.id for event in events if isinstance(event, Started)]


@pytest.mark.parametrize(("order", "started"), [("mean", ["short", "mid", "long"]), ("tail", ["long", "mid", "short"])])
def test_requests_start_in_the_order_that_was_set(order: Order, started: list[str]) -> None:
    runner = TimedRunner(num_blocks=1_024)
    with running_engine(runner, order=order, clock=runner.clock) as running:
        warm(running)
        hold_with(running)
        running.submit(generate("long", prompt(2, 1_900), max_tokens=1, waited_s=2.5))
        running.submit(generate("mid", prompt(3, 1_000), max_tokens=1, waited_s=1.2))
        running.submit(generate("short", prompt(4, 500), max_tokens=1))
        runner.resume()
        running.wait_ended("long", "mid", "short")
        assert starts(running)[2:] == started


def test_the_time_at_the_proxy_counts_for_the_order_and_not_for_the_queue_time() -> None:
    runner = TimedRunner()
    with running_engine(runner, clock=runner.clock) as running:
        warm(running)
        hold_with(running)
        running.submit(generate("short", prompt(2, 100), max_tokens=1))
        running.submit(generate("long", prompt(3, 1_000), max_tokens=1, waited_s=9.1))
        runner.resume()
        running.wait_ended("short", "long")
        assert starts(running)[2:] == ["long", "short"]
        assert running.end("long").usage.queue_s == pytest.approx(0.512)


def test_a_short_request_does_not_wait_for_the_whole_of_a_long_one() -> None:
    runner = TimedRunner(num_blocks=1_024)
    with running_engine(runner, clock=runner.clock) as running:
        warm(running)
        hold_with(running, "long", 10_000)
        running.submit(generate("short", prompt(2, 100), max_tokens=1))
        runner.resume()
        running.wait_ended("long", "short")
        slice_chunks = -(-slice_tokens(1_000) // MAX_STEP_TOKENS)
        assert running.end("short").usage.queue_s == pytest.approx(slice_chunks * MAX_STEP_TOKENS / 1_000)
        assert running.end("long").usage.prefill_s == pytest.approx(10.1)
        assert running.end("long").usage.computed_tokens == 10_000


def test_too_long_a_queue_says_when_to_come_again() -> None:
    runner = TimedRunner(num_blocks=1_024)
    with running_engine(runner, max_waiting=2, clock=runner.clock) as running:
        warm(running)
        hold_with(running)
        for number in range(2):
            running.submit(generate(str(number), prompt(2 + number, 9_000), max_tokens=1))
        with pytest.raises(Overloaded, match="2 requests wait already, the limit is 2; try again in 19 s") as caught:
            running.submit(generate("too many", [1], max_tokens=1))
        assert caught.value.retry_after_s == 19, "0.5 s in work and 18 s waiting"


# --- abort of what waits ----------------------------------------------------------------------------------


def test_an_abort_if_waiting_ends_what_has_not_started() -> None:
    runner = TimedRunner()
    with running_engine(runner, clock=runner.clock) as running:
        hold_with(running)
        running.submit(generate("a", prompt(2, 50)))
        running.engine.abort(OWNER, "a", if_waiting=True)
        runner.resume()
        assert running.end("a").reason == "aborted"
        assert running.started("a") == []
        assert running.end("held").reason == "length"


def test_an_abort_if_waiting_leaves_alone_what_has_started() -> None:
    runner = TimedRunner()
    with running_engine(runner, clock=runner.clock) as running:
        hold_with(running)
        running.engine.abort(OWNER, "held", if_waiting=True)
        running.engine.abort(OWNER, "nobody", if_waiting=True)
        runner.resume()
        assert running.end("held").reason == "length"
        assert len(running.started("held")) == 1


def test_an_abort_if_waiting_leaves_alone_what_has_started_and_lost_its_blocks() -> None:
    runner = TimedRunner(num_blocks=8)
    with running_engine(runner, clock=runner.clock) as running:
        for name in "ab":
            running.submit(generate(name, prompt(ord(name), 40), max_tokens=60))
        running.wait_for(lambda: running.metrics.preemptions._value.get() > 0)
        for name in "ab":
            running.engine.abort(OWNER, name, if_waiting=True)
        running.wait_ended("a", "b")
        assert [running.end(name).reason for name in "ab"] == ["length", "length"]


def test_an_abort_if_waiting_leaves_alone_what_waits_for_its_next_slice() -> None:
    runner = TimedRunner(num_blocks=1_024)
    with running_engine(runner, clock=runner.clock) as running:
        warm(running)
        hold_with(running, "long", 10_000)
        running.submit(generate("short", prompt(2, 1_000), max_tokens=1))
        runner.resume()
        running.wait_for(lambda: running.started("short") != [])
        running.engine.abort(OWNER, "long", if_waiting=True)
        running.wait_ended("long", "short")
        assert running.end("long").reason == "length"
        assert len(running.started("long")) == 1
        assert running.end("long").usage.preemptions == 0


def test_the_load_says_who_owes_a_first_token() -> None:
    runner = TimedRunner()
    with running_engine(runner, clock=runner.clock) as running:
        hold_with(running)
        load = running.engine.load
        assert (load.running, load.waiting, load.prefilling) == (1, 0, 1)
        running.submit(generate("a", prompt(2, 50), max_tokens=3))
        assert running.engine.load.waiting == 1
        runner.resume()
        running.wait_ended("held", "a")
        running.assert_nothing_is_held()
        loads = [output.load for output in running.outputs]
        assert any((load.running, load.waiting, load.prefilling) == (1, 0, 0) for load in loads), "while it decodes"


# --- closed loop ------------------------------------------------------------------------------------------


def test_a_wrong_prediction_is_mended_when_the_request_starts() -> None:
    runner = TimedRunner()
    with running_engine(runner, clock=runner.clock) as running:
        changes = running.engine.index_changes
        changes.restart(7)
        running.submit(generate("a", prompt(2, 256), max_tokens=1))
        running.end("a")
        running.wait_for(lambda: len(changes.held()) == 4)
        held, _ = changes.take(100)
        running.submit(generate("b", prompt(2, 300), max_tokens=1, predicted_hit_tokens=64, predicted_for=7))
        running.end("b")
        assert changes.take(100) == (held[1:], [])
        running.submit(
            generate("c", [2, *([7] * 127), *([8] * 128)], max_tokens=1, predicted_hit_tokens=192, predicted_for=7)
        )
        running.end("c")
        running.wait_for(lambda: len(changes.held()) == 6)
        stored, removed = changes.take(100)
        assert set(stored) == changes.held() - set(held), "the third index block was computed meanwhile"
        assert removed == []
        value = running.metrics.registry.get_sample_value
        for outcome, count in (("right", 0), ("too_few", 1), ("too_many", 1)):
            assert value("prefixcache_worker_predictions_total", {"outcome": outcome}) == count


def test_a_prediction_is_compared_once_whatever_becomes_of_the_request() -> None:
    runner = TimedRunner(num_blocks=8)
    with running_engine(runner, clock=runner.clock) as running:
        running.engine.index_changes.restart(7)
        for name in "ab":
            running.submit(
                generate(name, prompt(ord(name), 40), max_tokens=60, predicted_hit_tokens=0, predicted_for=7)
            )
        running.wait_ended("a", "b")
        assert sum(running.end(name).usage.preemptions for name in "ab") > 0
        value = running.metrics.registry.get_sample_value
        assert value("prefixcache_worker_predictions_total", {"outcome": "right"}) == 2


# --- random workloads against what a correct engine must deliver ------------------------------------------


@pytest.mark.parametrize("order", ["mean", "tail"])
def test_sliced_prefills_give_exactly_the_uncached_output(order: Order) -> None:
    random = seeded(f"sliced workload {order}")
    runner = TimedRunner(num_blocks=500)
    with running_engine(runner, order=order, clock=runner.clock) as running:
        warm(running)
        prompts: list[list[int]] = []
        for number in range(40):
            base = random.choice(prompts)[: random.randrange(7_000)] if prompts and random.random() < 0.6 else []
            length = random.choice([random.randrange(1, 300), random.randrange(1, 7_000)])
            tail = [random.randrange(VOCABULARY) for _ in range(max(min(length, 7_900 - len(base)), 1))]
            prompts.append([*base, *tail])
            running.submit(generate(str(number), prompts[-1], max_tokens=12, waited_s=random.choice([0.0, 20.0])))
            if random.random() < 0.1:
                running.engine.abort(OWNER, str(random.randrange(number + 1)), if_waiting=random.random() < 0.5)
            if random.random() < 0.3:
                running.wait_for(partial(running.events.get, str(number)))
        running.wait_for(lambda: all(running.ending(str(number)) for number in range(40)), 60.0)
        for number, tokens in enumerate(prompts):
            ending, truth = running.ending(str(number)), expected_output(tokens, 12, vocab_size=VOCABULARY)
            got = running.tokens(str(number))
            assert isinstance(ending, End)
            assert got == (truth if ending.reason == "length" else truth[: len(got)])
            usage = ending.usage
            if ending.reason == "length":
                assert usage.cached_tokens + usage.copied_tokens + usage.computed_tokens >= len(tokens), (
                    "more where a cut one lost some"
                )
            if not usage.preemptions:
                assert (
                    usage.computed_tokens <= (1 + MOST_COMPUTED) * len(tokens) + slice_tokens(1_000) + MAX_STEP_TOKENS
                )
        running.assert_nothing_is_held()
