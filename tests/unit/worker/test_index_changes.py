"""Net changes between step thread and publisher."""

from __future__ import annotations

from tests.support.seeds import seeded
from worker.index_changes import IndexChanges, Repaired


def test_a_change_and_its_opposite_leave_nothing() -> None:
    changes = IndexChanges()
    changes.store(1)
    changes.remove(1)
    assert not changes
    assert changes.take(10) == ([], [])


def test_a_removal_after_the_store_was_taken_is_told() -> None:
    changes = IndexChanges()
    changes.store(1)
    assert changes.take(10) == ([1], [])
    changes.remove(1)
    assert changes
    assert changes.take(10) == ([], [1])
    assert not changes


def test_take_keeps_to_its_limit_and_gives_the_oldest_first() -> None:
    changes = IndexChanges()
    for value in (1, 2, 3):
        changes.store(value)
    changes.take(10)
    changes.remove(2)
    for value in (4, 5, 6):
        changes.store(value)
    assert changes.take(3) == ([4, 5], [2])
    assert changes.take(3) == ([6], [])


def test_restart_tells_everything_held_and_nothing_else() -> None:
    changes = IndexChanges()
    for value in (1, 2, 3):
        changes.store(value)
    changes.take(10)
    changes.remove(2)
    changes.restart(7)
    assert changes.take(10) == ([1, 3], [])


def test_what_was_taken_adds_up_to_what_is_held() -> None:
    random = seeded("index changes")
    changes, told = IndexChanges(), set[int]()
    for _ in range(3_000):
        action = random.random()
        if action < 0.5 and (absent := set(range(30)) - changes.held()):
            changes.store(random.choice(sorted(absent)))
        elif action < 0.8 and changes.held():
            changes.remove(random.choice(sorted(changes.held())))
        elif action < 0.82:
            changes.restart(7)
            told.clear()
        else:
            stored, removed = changes.take(random.randrange(1, 6))
            assert told.isdisjoint(stored)
            assert told.issuperset(removed)
            told = (told | set(stored)) - set(removed)
        if not changes:
            assert told == changes.held()


# --- repairs ----------------------------------------------------------------------------------------------


def told_of(*values: int) -> IndexChanges:
    """Under incarnation 7 the index was told that these are held."""
    changes = IndexChanges()
    changes.restart(7)
    for value in values:
        changes.store(value)
    changes.take(100)
    return changes


def test_a_claim_of_nothing_is_removed_and_a_missing_one_stored_again() -> None:
    changes = told_of(1, 2)
    assert changes.repair(7, [1, 2, 3, 4]) == Repaired(num_stored=2, num_removed=2)
    assert changes.take(10) == ([1, 2], [3, 4])
    assert not changes


def test_what_is_to_be_told_anyway_is_no_repair() -> None:
    changes = told_of(1)
    changes.remove(1)
    changes.store(2)
    assert changes.repair(7, [1, 2]) == Repaired(num_stored=0, num_removed=0)
    assert changes.take(10) == ([2], [1])


def test_nothing_is_repaired_that_was_read_of_another_incarnation() -> None:
    changes = told_of(1)
    assert (changes.is_of(7), changes.is_of(6)) == (True, False)
    assert changes.repair(6, [1, 2]) == Repaired(num_stored=0, num_removed=0)
    assert IndexChanges().repair(0, [1]) == Repaired(num_stored=0, num_removed=0)
    assert not changes


def test_a_block_that_comes_while_its_removal_is_to_be_told_is_told() -> None:
    """Whoever read the claim may have read it just before the index dropped it: to cancel both would lose it."""
    changes = told_of()
    changes.repair(7, [5])
    changes.store(5)
    assert changes.take(10) == ([5], [])
    changes.repair(7, [5])
    changes.remove(5)
    assert changes.take(10) == ([], [5])


def test_after_it_was_told_a_change_and_its_opposite_cancel_again() -> None:
    changes = told_of()
    changes.repair(7, [5])
    changes.take(10)
    changes.store(5)
    changes.remove(5)
    assert not changes


def test_a_new_incarnation_is_told_what_is_held_and_no_repairs() -> None:
    changes = told_of(1)
    changes.repair(7, [1, 2])
    changes.restart(8)
    assert changes.take(10) == ([1], [])
    changes.store(2)
    changes.remove(2)
    assert not changes


def test_an_index_that_went_wrong_is_right_once_all_was_repaired() -> None:
    """Claims vanish and appear by themselves; what is read wrong is repaired, while blocks come and go."""
    random = seeded("repairs")
    changes, index = told_of(), set[int]()
    for _ in range(3_000):
        action, value = random.random(), random.randrange(30)
        if action < 0.3:
            if value in changes.held():
                changes.remove(value)
            else:
                changes.store(value)
        elif action < 0.4:
            index ^= {value}
        elif action < 0.6:
            changes.repair(7, [value] if (value in index) != (value in changes.held()) else [])
        else:
            stored, removed = changes.take(random.randrange(1, 6))
            assert not set(stored) & set(removed)
            index = (index | set(stored)) - set(removed)
    while (wrong := index ^ changes.held()) or changes:
        changes.repair(7, wrong)
        stored, removed = changes.take(5)
        assert stored or removed
        index = (index | set(stored)) - set(removed)
