"""What each step computes, decided without a runner or a clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.scheduler_steps import Steps, numbers


@pytest.fixture
def steps() -> Iterator[Steps]:
    made = Steps()
    yield made
    made.scheduler.check_integrity()


def test_a_prefill_is_cut_into_chunks_that_end_with_a_block(steps: Steps) -> None:
    steps.add("a", numbers(0, 37))
    assert [steps.step() for _ in range(4)] == [{"a": 16}, {"a": 16}, {"a": 5}, {"a": 1}]


def test_decodes_come_first_and_prefills_share_what_is_left_in_order(steps: Steps) -> None:
    steps.add("a", numbers(0, 3))
    steps.step()
    steps.add("b", numbers(100, 10))
    steps.add("c", numbers(200, 10))
    assert steps.step() == {"a": 1, "b": 10, "c": 4}
    assert steps.step() == {"a": 1, "b": 1, "c": 6}


def test_a_request_with_a_known_prefix_computes_only_the_rest(steps: Steps) -> None:
    steps.add("a", numbers(0, 16))
    steps.step()
    b = steps.add("b", [*numbers(0, 12), 500, 501])
    assert steps.step() == {"a": 1, "b": 2}
    assert b.cached_tokens == 12


def test_an_equal_prompt_still_computes_its_last_token(steps: Steps) -> None:
    steps.add("a", numbers(0, 16))
    steps.step()
    b = steps.add("b", numbers(0, 16))
    assert steps.step() == {"a": 1, "b": 1}
    assert (b.cached_tokens, b.copied_tokens) == (12, 3)


def test_a_second_request_follows_one_chunk_behind_the_first(steps: Steps) -> None:
    steps.add("a", numbers(0, 40))
    b = steps.add("b", [*numbers(0, 36), *numbers(500, 4)])
    assert steps.step() == {"a": 16}
    assert steps.step() == {"a": 16}
    assert steps.step() == {"a": 8}
    assert steps.step() == {"a": 1, "b": 4}
    assert b.cached_tokens == 36


def test_a_follower_that_runs_already_follows_too(steps: Steps) -> None:
    a = steps.add("a", numbers(0, 24))
    b = steps.add("b", [*numbers(0, 24), *numbers(500, 20)])
    steps.step()
    steps.scheduler.finish(a)
    c = steps.add("c", [*numbers(0, 24), *numbers(500, 20), 7])
    assert steps.step() == {"b": 16}
    assert steps.step() == {"b": 12}
    assert steps.step() == {"b": 1, "c": 1}
    assert (b.cached_tokens, c.cached_tokens) == (16, 44)


def test_a_running_prefill_takes_what_stands_in_the_pool_by_now(steps: Steps) -> None:
    a = steps.add("a", numbers(0, 40))
    assert steps.step() == {"a": 16}
    taken = steps.pool.allocate(3)
    assert taken is not None
    table = [*a.block_table, *taken]
    for position in range(4, 7):
        value, content = a.block_hash(position), a.block_content(position)
        steps.pool.register(table, position, value=value, token_ids=content, root=a.root)
    steps.pool.release(taken)
    assert steps.step() == {"a": 12}
    assert (a.cached_tokens, a.prefilled_tokens, a.block_table[4:7]) == (12, 28, taken)


def test_a_preempted_request_computes_only_what_was_evicted_of_it() -> None:
    """Its finished blocks stay findable; the others need some of them, those it used last to the end."""
    steps = Steps(num_blocks=12, step_tokens=32)
    a = steps.add("a", numbers(0, 17), max_tokens=20)
    b = steps.add("b", numbers(100, 21), max_tokens=8)
    while not b.num_preemptions:
        steps.step()
    kept = sum(steps.pool.is_findable(b.block_hash(position)) for position in range(b.num_reusable_blocks))
    assert kept >= 3
    assert (b.block_table, steps.pool.num_in_use) == ([], len(a.block_table))
    reached = b.num_tokens
    steps.scheduler.finish(a)
    assert steps.step() == {"b": reached - 4 * kept}
    assert b.cached_tokens == 0, "what it had computed itself is no hit"
    steps.run()
    assert b.num_output_tokens == 8


def test_a_follower_takes_over_when_the_first_one_ends(steps: Steps) -> None:
    a = steps.add("a", numbers(0, 40))
    b = steps.add("b", numbers(0, 40))
    steps.step()
    steps.step()
    steps.scheduler.finish(a)
    assert steps.step() == {"b": 8}
    assert b.cached_tokens == 32


def test_another_prompt_passes_the_one_that_waits_for_a_block(steps: Steps) -> None:
    steps.add("a", numbers(0, 8))
    steps.add("b", numbers(0, 12))
    steps.add("c", numbers(500, 8))
    assert steps.step() == {"a": 8, "c": 8}
    assert steps.step() == {"a": 1, "c": 1, "b": 4}


def test_any_number_is_passed_in_a_step() -> None:
    steps = Steps(step_tokens=64)
    steps.add("a", numbers(0, 8))
    for number in range(40):
        steps.add(f"b{number}", [*numbers(0, 8), number])
    steps.add("c", numbers(500, 8))
    assert steps.step() == {"a": 8, "c": 8}
    assert [sequence.id for sequence in steps.scheduler.waiting] == [f"b{number}" for number in range(40)]


def test_two_requests_that_need_the_last_block_of_an_equal_prompt_do_not_wait_in_vain(steps: Steps) -> None:
    steps.add("a", numbers(0, 8))
    steps.step()
    steps.add("b", numbers(0, 8))
    steps.add("c", numbers(0, 8))
    assert steps.step() == {"a": 1, "b": 1, "c": 1}
    assert steps.pool.num_in_use == 2 + 1


def test_no_more_than_max_running_are_admitted() -> None:
    steps = Steps(max_running=2)
    for name in "abc":
        steps.add(name, [ord(name)])
    assert steps.step() == {"a": 1, "b": 1}
    assert steps.step() == {"a": 1, "b": 1}
    steps.scheduler.check_integrity()


def test_a_step_always_has_room_for_a_block_of_prefill() -> None:
    with pytest.raises(ValueError, match="leave no block"):
        Steps(step_tokens=10, max_running=7)


def test_admission_waits_for_blocks_and_nobody_passes() -> None:
    steps = Steps(num_blocks=8)
    a = steps.add("a", numbers(0, 12))
    assert steps.step() == {"a": 12}
    steps.add("b", numbers(100, 20), waited_s=1.0)
    steps.add("c", numbers(200, 1))
    assert steps.step() == {"a": 1}
    steps.scheduler.finish(a)
    assert steps.step() == {"b": 16}
    assert steps.step() == {"b": 4, "c": 1}
    steps.scheduler.check_integrity()


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    steps = Steps(num_blocks=6)
    a = steps.add("a", numbers(0, 7), max_tokens=16)
    b = steps.add("b", numbers(100, 7), max_tokens=16)
    c = steps.add("c", numbers(200, 7), max_tokens=16)
    assert steps.step() == {"a": 7, "b": 7}
    steps.add("d", numbers(300, 7))
    while not b.num_preemptions:
        before = b.num_tokens
        steps.step()
    assert (a.num_preemptions, b.num_preemptions, c.num_preemptions) == (0, 1, 0)
    assert [sequence.id for sequence in steps.scheduler.waiting] == ["b", "c", "d"]
    assert b.num_tokens == before
    while a in steps.scheduler.live():
        steps.step()
    while b in steps.scheduler.live():
        steps.step()
    assert b.num_output_tokens == 16
    assert c in steps.scheduler.live()


def test_a_request_that_fills_the_whole_pool_runs_to_its_end() -> None:
    steps = Steps(num_blocks=4)
    a = steps.add("a", numbers(0, 10), max_tokens=6)
    b = steps.add("b", numbers(0, 15), max_tokens=1)
    while steps.scheduler.has_work:
        assert steps.step()
    assert (a.num_output_tokens, b.num_output_tokens) == (6, 1)


def test_finishing_a_waiting_request_takes_it_out_of_the_queue(steps: Steps) -> None:
    a = steps.add("a", numbers(0, 4))
    steps.scheduler.finish(a)
    assert not steps.scheduler.has_work
    assert steps.scheduler.of_owner("owner", "a") == []


def test_requests_are_found_by_their_owner_and_name(steps: Steps) -> None:
    a, b = steps.add("a", numbers(0, 4)), steps.add("b", numbers(4, 8))
    assert steps.scheduler.of_owner("owner", "a") == [a]
    assert steps.scheduler.of_owner("owner", None) == [a, b]
    assert steps.scheduler.of_owner("another", None) == steps.scheduler.of_owner("another", "a") == []
