"""Order and slices: what goes between the slices of a long prefill, and what its guards keep from going wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixcache.routing.order import AGEING
from prefixcache.routing.slices import LEAST_SLICE_TOKENS, MOST_COMPUTED
from tests.support.scheduler_steps import Steps, numbers
from worker import waiting_queue
from worker.sequence import Sequence

RATE = 256.0
SLICE = LEAST_SLICE_TOKENS
"""Tokens of a slice at so low a rate; up to half as much again is short."""


def made(*, num_blocks: int = 1_024, checks_integrity: bool = True) -> Steps:
    return Steps(
        num_blocks=num_blocks,
        block_size=16,
        step_tokens=256,
        max_running=16,
        rate=RATE,
        checks_integrity=checks_integrity,
    )


def run_until(steps: Steps, condition: Callable[[], bool]) -> list[dict[str, int]]:
    taken: list[dict[str, int]] = []
    while not condition():
        taken.append(steps.step())
        assert len(taken) < 1_000, steps.scheduler.live()
    return taken


def first_tokens(steps: Steps) -> list[str]:
    """Names in the order in which their prefills ended, once all have."""
    sequences = steps.scheduler.live()
    steps.run()
    sequences.sort(key=lambda sequence: sequence.first_token_at or 0.0)
    return [sequence.id for sequence in sequences]


def test_the_shortest_prefill_is_computed_first() -> None:
    steps = made()
    steps.add("long", numbers(0, 1_500), max_tokens=1)
    steps.add("short", numbers(10_000, 100), max_tokens=1)
    assert steps.step() == {"short": 100, "long": 144}
    assert steps.step() == {"long": 256}


def test_a_short_prefill_goes_between_two_slices_and_the_long_one_goes_on_after_it() -> None:
    steps = made()
    long = steps.add("long", numbers(0, 6_000), max_tokens=1)
    steps.step()
    short = steps.add("short", numbers(10_000, 512), max_tokens=1)
    taken = run_until(steps, lambda: short.first_token_at is not None)
    assert taken == [{"long": 256}] * 3 + [{"short": 256}] * 2
    assert (long.block_table, steps.scheduler.sliced_tokens) == ([], (6_000 - SLICE,))
    assert steps.step() == {"long": 256}
    assert long.num_computed_tokens == SLICE + 256
    assert long.cached_tokens == 0, "what it had computed itself is no hit"
    steps.run()
    assert (long.prefilled_tokens, short.prefilled_tokens) == (6_000, 512)


def test_nothing_goes_into_a_prefill_that_is_short_enough() -> None:
    steps = made()
    steps.add("almost long", numbers(0, SLICE + SLICE // 2), max_tokens=1)
    steps.step()
    steps.add("short", numbers(10_000, 100), max_tokens=1)
    assert [steps.step() for _ in range(5)] == [{"almost long": 256}] * 5
    assert steps.step() == {"short": 100}


def test_the_rest_of_a_long_one_is_not_cut_once_it_is_short() -> None:
    steps = made()
    steps.add("long", numbers(0, 2_500), max_tokens=1)
    for _ in range(4):
        assert steps.step() == {"long": 256}
    assert steps.scheduler.sliced_tokens == (2_500 - SLICE,)
    steps.step()
    assert (steps.scheduler.sliced_tokens, steps.scheduler.prefill_tokens) == ((0,), 2_500 - SLICE - 256)
    steps.add("short", numbers(10_000, 16), max_tokens=1)
    assert [steps.step() for _ in range(4)] == [{"long": 256}] * 4
    assert steps.step() == {"long": 2_500 - 9 * 256, "short": 16}


def test_the_rest_of_the_slice_and_what_is_left_after_it() -> None:
    steps = made()
    steps.add("long", numbers(0, 6_000), max_tokens=1)
    assert (steps.scheduler.prefill_tokens, steps.scheduler.sliced_tokens) == (0, ())
    steps.step()
    assert (steps.scheduler.prefill_tokens, steps.scheduler.sliced_tokens) == (SLICE - 256, (6_000 - SLICE,))
    for _ in range(3):
        steps.step()
    assert (steps.scheduler.prefill_tokens, steps.scheduler.sliced_tokens) == (0, (6_000 - SLICE,))
    steps.step()
    assert (steps.scheduler.prefill_tokens, steps.scheduler.sliced_tokens) == (SLICE - 256, (6_000 - 2 * SLICE,))


def test_one_longer_than_half_of_what_a_sliced_one_still_needs_waits_until_that_has_its_first_token() -> None:
    steps = made()
    steps.add("first", numbers(0, 6_000), max_tokens=1)
    for _ in range(4):
        steps.step()
    half = (6_000 - SLICE) // 2
    steps.add("more", numbers(10_000, half + 1), max_tokens=1, waited_s=1_000.0)
    steps.add("half", numbers(20_000, half), max_tokens=1)
    steps.add("short", numbers(30_000, 1_500), max_tokens=1)
    assert first_tokens(steps) == ["short", "half", "first", "more"]


def test_sliced_ones_stand_within_each_other_and_the_shortest_rest_goes_first() -> None:
    steps = made(num_blocks=4_096)
    names = {"a": 20_000, "b": 9_000, "c": 3_500, "d": 100}
    order: list[str] = []
    for number, (name, length) in enumerate(names.items()):
        steps.add(name, numbers(100_000 * number, length), max_tokens=1)
        for _ in range(4 if length > SLICE else 1):
            order += steps.step()
    assert order == [*"aaaabbbbcccc", "d", "c"], "d leaves 156 tokens of its step to c"
    assert sorted(steps.scheduler.sliced_tokens) == [3_500 - 2 * SLICE, 9_000 - SLICE, 20_000 - SLICE]
    assert steps.scheduler.waiting_tokens == 0
    assert steps.scheduler.prefill_tokens == SLICE - 144
    ended = first_tokens(steps)
    assert ended == ["c", "b", "a"]
    assert all(sequence.prefilled_tokens == names[sequence.id] for sequence in steps.ended)


def test_the_smallest_rest_says_what_may_pass() -> None:
    steps = made(num_blocks=4_096)
    for number, length in enumerate((20_000, 6_000)):
        steps.add(str(number), numbers(100_000 * number, length), max_tokens=1)
        for _ in range(4):
            steps.step()
    steps.add("4_000", numbers(500_000, 4_000), max_tokens=1, waited_s=1_000.0)
    steps.add("2_400", numbers(600_000, 2_400), max_tokens=1)
    assert steps.step() == {"2_400": 256}
    assert first_tokens(steps) == ["2_400", "1", "4_000", "0"]


@pytest.mark.parametrize(("share", "first"), [(1.2, "old"), (0.8, "new")])
def test_what_may_pass_goes_first_only_where_the_order_says_so(share: float, first: str) -> None:
    """The rest of the old one is longer by 12 s of prefill."""
    steps = made()
    steps.add("old", numbers(0, 7_000), max_tokens=1, waited_s=share * 12.0 / AGEING)
    for _ in range(4):
        steps.step()
    steps.add("new", numbers(100_000, 7_000 - SLICE - 12 * 256), max_tokens=1)
    assert first_tokens(steps)[0] == first


def test_nothing_is_kept_from_others_for_one_that_was_cut() -> None:
    """What they evict of it is computed again; it is the last that goes."""
    steps = made(num_blocks=700)
    long = steps.add("long", numbers(0, 8_000), max_tokens=1)
    for _ in range(4):
        steps.step()
    for number in range(4):
        steps.add(str(number), numbers(100_000 + 10_000 * number, 2_400), max_tokens=1)
        steps.add(f"{number} again", numbers(100_000 + 10_000 * number, 2_400), max_tokens=1)
    steps.step()
    assert (long.block_table, steps.pool.num_in_use) == ([], 16)
    assert first_tokens(steps)[-1] == "long"
    assert all(sequence.prefilled_tokens in (2_400, 1) for sequence in steps.ended[:-1])
    assert long.prefilled_tokens == 8_000
    assert long.num_preemptions == 0


def test_one_that_goes_first_again_keeps_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = made()
    steps.add("long", numbers(0, 6_000), max_tokens=1, waited_s=1_000.0)
    steps.step()
    steps.add("short", numbers(10_000, 100), max_tokens=1)
    steps.add("too long to pass", numbers(20_000, 5_000), max_tokens=1, waited_s=9_000.0)
    monkeypatch.setattr(steps.scheduler, "_give_back", lambda sequence: pytest.fail("for nobody"))
    assert [steps.step() for _ in range(20)] == [{"long": 256}] * 20


def test_a_long_cached_prompt_is_known_for_short_when_a_slice_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps it takes to find all of it; and what was cut is known at once."""
    steps = made(num_blocks=2_048)
    steps.add("before", numbers(50_000, 4_000), max_tokens=1)
    steps.run()
    long = steps.add("long", numbers(0, 6_000), max_tokens=1)
    steps.step()
    monkeypatch.setattr(waiting_queue, "MOST_WALKED_BLOCKS", 125)
    cached = steps.add("cached", [*numbers(50_000, 4_000), 7], max_tokens=1)
    for _ in range(3):
        assert steps.step() == {"long": 256}
    assert steps.step() == {"cached": 1, "long": 240}
    assert cached.cached_tokens == 4_000
    assert steps.scheduler.sliced_tokens == (6_000 - 2 * SLICE,)
    assert long.prefilled_tokens == SLICE + 240


def test_what_was_evicted_of_a_cut_one_is_computed_again() -> None:
    steps = made(num_blocks=1_024)
    long = steps.add("long", numbers(0, 8_000), max_tokens=1)
    for _ in range(4):
        steps.step()
    steps.add("other", numbers(100_000, 1_000), max_tokens=1)
    steps.step()
    taken = steps.pool.allocate(steps.pool.num_available - 10)
    assert taken is not None
    steps.pool.release(taken)
    steps.run()
    assert (long.prefilled_tokens, long.cached_tokens) == (8_000 + SLICE - 160, 0)


def test_short_ones_pass_a_long_one_only_until_it_has_waited_so_many_times_as_long() -> None:
    """A new short prefill arrives before each step: 7/8 of the worker are theirs for the asking."""
    steps = made(num_blocks=4_096)
    long = steps.add("long", numbers(0, 4_096), max_tokens=1)
    for number in range(1_000):
        steps.add(f"short{number}", numbers(10_000 + 1_000 * number, 224), max_tokens=1)
        steps.step()
        if long.first_token_at is not None:
            break
    assert long.first_token_at is not None
    assert 4_096 / RATE < long.first_token_at < (2 + 1 / AGEING) * 4_096 / RATE
    assert max(waits(steps.ended)) < (2 + 1 / AGEING) * 4_096 / RATE


def waits(ended: list[Sequence]) -> list[float]:
    return [(sequence.started_at or 0.0) - sequence.arrived_at for sequence in ended]


def test_short_ones_evict_a_cut_one_only_where_nothing_else_is_left() -> None:
    steps = made(num_blocks=300)
    long = steps.add("long", numbers(0, 4_000), max_tokens=8)
    for number in range(40):
        steps.add(f"short{number}", numbers(10_000 + 1_000 * number, 200), max_tokens=4)
    steps.run()
    assert long.prefilled_tokens <= MOST_COMPUTED * 4_000 + SLICE
    assert not any(sequence.num_preemptions for sequence in steps.ended)


def test_a_short_one_has_the_room_of_one_that_was_cut() -> None:
    steps = made(num_blocks=260)
    steps.add("long", numbers(0, 4_096), max_tokens=1)
    steps.step()
    steps.add("short", numbers(10_000, 100), max_tokens=1)
    assert [steps.step() for _ in range(3)] == [{"long": 256}] * 3
    assert steps.step() == {"short": 100}
    assert steps.run() == [{"long": 256}] * 12


def test_one_whose_slice_is_over_preempts_nobody_for_the_next_one() -> None:
    """Decodes have taken the room meanwhile: it gives its own back and begins again when there is enough."""
    steps = made(num_blocks=400, checks_integrity=False)
    long = steps.add("long", numbers(0, 4_000), max_tokens=1)
    steps.step()
    decode = steps.add("decode", numbers(50_000, 16), max_tokens=50)
    while decode.first_token_at is None:
        steps.step()
    while steps.scheduler.prefill_tokens:
        steps.step()
    taken = steps.pool.allocate(steps.pool.num_available - 3)
    assert taken is not None
    left = steps.scheduler.sliced_tokens
    assert [steps.step() for _ in range(3)] == [{"decode": 1}] * 3
    assert (long.num_preemptions, decode.num_preemptions, long.block_table) == (0, 0, [])
    assert steps.scheduler.sliced_tokens == left
    steps.pool.release(taken)
    assert steps.step() == {"decode": 1, "long": 240}


def test_one_that_follows_a_sliced_one_takes_over_when_that_ends() -> None:
    steps = made()
    long = steps.add("long", numbers(0, 6_000), max_tokens=1)
    follower = steps.add("follower", [*numbers(0, 5_000), *numbers(50_000, 2_000)], max_tokens=1)
    for _ in range(5):
        steps.step()
    steps.scheduler.finish(long)
    steps.run()
    assert follower.cached_tokens == 5 * 256
    assert follower.prefilled_tokens == 7_000 - 5 * 256


def test_equal_long_prompts_are_computed_once() -> None:
    steps = made()
    for name in "abc":
        steps.add(name, numbers(0, 6_000), max_tokens=1)
    taken = steps.run()
    assert sum(sum(shares.values()) for shares in taken) == 6_000 + 2 * 1


def test_a_cut_prefill_takes_what_another_has_computed_meanwhile() -> None:
    steps = made()
    long = steps.add("long", numbers(0, 2_700), max_tokens=1)
    for _ in range(4):
        steps.step()
    other = steps.add("other", [*numbers(0, 2_300), 7], max_tokens=1)
    assert steps.step() == {"other": 256}, "1,277 tokens are less than the rest of 1,676"
    steps.run()
    assert other.cached_tokens == SLICE
    assert long.cached_tokens == 2_288 - SLICE
    assert long.copied_tokens == 2_300 - 2_288
    assert long.prefilled_tokens + long.cached_tokens + long.copied_tokens == 2_700


def test_the_last_token_of_a_sliced_prefill_may_be_left_alone() -> None:
    steps = made()
    steps.add("long", numbers(0, 10 * 256 + 1), max_tokens=1)
    assert steps.run() == [{"long": 256}] * 10 + [{"long": 1}]


def test_a_cut_prefill_of_which_others_left_one_token_is_like_a_decode() -> None:
    steps = made()
    steps.add("long", numbers(0, 159 * 16 + 1), max_tokens=1)
    for _ in range(4):
        steps.step()
    other = steps.add("other", numbers(0, 159 * 16 + 10), max_tokens=1, waited_s=100.0)
    while other.first_token_at is None:
        steps.step()
    assert sum(steps.scheduler.sliced_tokens) > 0
    steps.add("short", numbers(10_000, 256), max_tokens=1)
    assert steps.step() == {"long": 1, "short": 240}


def test_what_a_cut_prefill_leaves_of_a_step_goes_to_those_behind_it() -> None:
    steps = made()
    steps.add("long", numbers(0, 2_600), max_tokens=1)
    for _ in range(4):
        steps.step()
    other = steps.add("other", [*numbers(0, 2_480), 7], max_tokens=1, waited_s=100.0)
    while other.first_token_at is None:
        steps.step()
    steps.add("behind", numbers(10_000, 136), max_tokens=1)
    assert steps.step() == {"long": 120, "behind": 136}


def test_what_the_last_chunk_of_a_sliced_prefill_leaves_goes_to_the_next_long_one() -> None:
    steps = made()
    steps.add("first", numbers(0, 2_400), max_tokens=1)
    steps.step()
    steps.add("second", numbers(10_000, 6_000), max_tokens=1)
    assert [steps.step() for _ in range(8)] == [{"first": 256}] * 8
    assert steps.step() == {"first": 96, "second": 160}
    assert steps.scheduler.sliced_tokens == (6_000 - SLICE,)


def test_a_prefill_that_had_to_compute_one_and_a_half_times_its_prompt_is_not_cut_any_more() -> None:
    steps = made()
    long = steps.add("long", numbers(0, 6_000), max_tokens=1)
    long.prefilled_tokens = 9_000
    steps.step()
    assert (steps.scheduler.prefill_tokens, steps.scheduler.sliced_tokens) == (6_000 - 256, ())


def test_the_end_of_a_cut_prefill_lets_the_next_long_one_begin() -> None:
    steps = made()
    first = steps.add("first", numbers(0, 6_000), max_tokens=1)
    for _ in range(4):
        steps.step()
    second = steps.add("second", numbers(10_000, 9_000), max_tokens=1)
    assert steps.step() == {"first": 256}
    for _ in range(3):
        steps.step()
    steps.scheduler.finish(first)
    assert steps.step() == {"second": 256}
    assert steps.scheduler.sliced_tokens == (9_000 - SLICE,)
    steps.scheduler.finish(second)
    assert not any((steps.scheduler.sliced_tokens, steps.scheduler.has_work))


def test_a_preempted_request_goes_before_the_order_and_between_slices_however_long_it_is() -> None:
    steps = made(num_blocks=1_000)
    decode = steps.add("decode", numbers(50_000, 2_000), max_tokens=30)
    while decode.first_token_at is None:
        steps.step()
    steps.add("long", numbers(0, 6_000), max_tokens=1)
    while steps.scheduler.prefill_tokens or not steps.scheduler.sliced_tokens:
        steps.step()
    steps.scheduler._preempt(decode)
    evict_everything(steps)
    steps.add("short", numbers(10_000, 10), max_tokens=1, waited_s=1e6)
    assert [steps.step() for _ in range(7)] == [{"decode": 256}] * 7, "it is not cut: its client has begun to read"
    assert list(steps.step()) == ["decode", "short", "long"]
    steps.run()
    assert decode.cached_tokens == 0, "what it had computed itself is no hit"


def evict_everything(steps: Steps) -> None:
    taken = steps.pool.allocate(steps.pool.num_available)
    assert taken is not None
    steps.pool.release(taken)
