"""Net changes between step thread and publisher."""

from __future__ import annotations

from tests.support.seeds import seeded
from worker.index_changes import IndexChanges


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
    changes.restart()
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
            changes.restart()
            told.clear()
        else:
            stored, removed = changes.take(random.randrange(1, 6))
            assert told.isdisjoint(stored)
            assert told.issuperset(removed)
            told = (told | set(stored)) - set(removed)
        if not changes:
            assert told == changes.held()
