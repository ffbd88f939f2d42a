"""Less than a block is reused: what is copied, what is kept for it, and where it must not be."""

from __future__ import annotations

import pytest

from tests.support.scheduler_steps import Steps, numbers


@pytest.fixture
def steps() -> Steps:
    return Steps()


def ended(steps: Steps, name: str, prompt: list[int], *, max_tokens: int = 1) -> None:
    steps.add(name, prompt, max_tokens=max_tokens)
    steps.run()


def test_one_that_goes_on_where_another_ended_computes_only_what_is_new(steps: Steps) -> None:
    ended(steps, "a", numbers(0, 6))
    b = steps.add("b", [*numbers(0, 6), 50, 51, 52], max_tokens=1)
    assert steps.step() == {"b": 3}
    assert (b.cached_tokens, b.copied_tokens, b.prefilled_tokens) == (4, 2, 3)


def test_the_answer_is_kept_but_for_its_last_token_which_was_never_fed(steps: Steps) -> None:
    a = steps.add("a", numbers(0, 5), max_tokens=3)
    steps.run()
    b = steps.add("b", [*a.tokens, 50], max_tokens=1)
    assert steps.step() == {"b": 2}
    assert (b.cached_tokens, b.copied_tokens) == (4, 3)


def test_prompts_that_part_within_a_block_share_its_beginning(steps: Steps) -> None:
    ended(steps, "a", numbers(0, 8))
    b = steps.add("b", [*numbers(0, 6), 50, 51], max_tokens=1)
    assert steps.step() == {"b": 2}
    assert (b.cached_tokens, b.copied_tokens) == (4, 2)


def test_a_prompt_shorter_than_a_block_is_reused(steps: Steps) -> None:
    ended(steps, "a", [7, 8])
    b = steps.add("b", [7, 8, 9], max_tokens=1)
    assert steps.step() == {"b": 1}
    assert (b.cached_tokens, b.copied_tokens) == (0, 2)


def test_a_chunk_that_begins_within_a_block_ends_with_one() -> None:
    steps = Steps(step_tokens=16)
    ended(steps, "a", numbers(0, 6))
    steps.add("b", numbers(0, 40), max_tokens=1)
    assert steps.run() == [{"b": 14}, {"b": 16}, {"b": 4}]


def test_of_one_that_lost_its_blocks_what_it_had_begun_is_copied_when_it_begins_again() -> None:
    steps = Steps(num_blocks=6)
    old = steps.add("old", numbers(0, 8), max_tokens=16)
    steps.step()
    new = steps.add("new", numbers(100, 6), max_tokens=9)
    while not new.num_preemptions:
        steps.step()
    steps.run()
    assert old.num_preemptions == 0 and new.num_output_tokens == 9
    assert new.copied_tokens == 0, "what it has had before is not counted"


def test_of_one_that_failed_only_full_blocks_are_reused(steps: Steps) -> None:
    a = steps.add("a", numbers(0, 6), max_tokens=9)
    steps.step()
    steps.scheduler.finish(a, failed=True)
    b = steps.add("b", numbers(0, 6), max_tokens=1)
    assert steps.step() == {"b": 2}
    assert (b.cached_tokens, b.copied_tokens) == (4, 0)


def test_one_that_is_aborted_leaves_what_it_computed(steps: Steps) -> None:
    a = steps.add("a", numbers(0, 7), max_tokens=9)
    steps.step()
    steps.scheduler.finish(a)
    b = steps.add("b", numbers(0, 7), max_tokens=1)
    assert steps.step() == {"b": 1}
    assert (b.cached_tokens, b.copied_tokens) == (4, 2)


def test_where_its_room_is_needed_nothing_is_copied() -> None:
    """The kept block is one of four, and all four are needed."""
    steps = Steps(num_blocks=4)
    ended(steps, "a", [7, 8])
    b = steps.add("b", [7, *numbers(100, 14)], max_tokens=1)
    assert steps.run() == [{"b": 15}]
    assert b.copied_tokens == 0


def test_what_is_copied_from_is_not_given_away_in_the_same_step() -> None:
    """b copies from the only block that could be evicted for c, which waits for the next step."""
    steps = Steps(num_blocks=4)
    ended(steps, "a", [7, 8])
    steps.add("b", [7, 50, 51], max_tokens=1)
    steps.add("c", numbers(100, 8), max_tokens=1)
    assert steps.run() == [{"b": 2}, {"c": 8}]


def test_a_prefix_of_another_root_is_not_copied(steps: Steps) -> None:
    ended(steps, "a", numbers(0, 6))
    b = steps.add("b", numbers(0, 6), max_tokens=1)
    b.root = 77
    assert steps.step() == {"b": 6}


def test_one_whose_next_block_is_being_computed_waits_rather_than_copy(steps: Steps) -> None:
    ended(steps, "a", numbers(0, 2))
    steps.add("b", numbers(0, 9), max_tokens=1)
    steps.add("c", numbers(0, 9), max_tokens=1)
    assert steps.step() == {"b": 7}
    assert steps.step() == {"c": 1}
