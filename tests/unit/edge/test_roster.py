"""Who stands in the list, look by look."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.address import Address
from edge.roster import Roster, Saying, Word
from prefixcache.limits import EDGE_SILENT_LOOKS

ONE, TWO, THREE = (Address(f"10.0.0.{number}", 8000) for number in (1, 2, 3))
READY, NOT_READY, REFUSED, SILENT = map(Saying, Word)


def test_only_the_ready_stand_in_it() -> None:
    roster = Roster()
    assert roster.look({ONE: READY, TWO: NOT_READY, THREE: REFUSED}) == (ONE,)
    assert roster.num_ready == 1


def test_all_stand_in_it_while_nobody_is_ready() -> None:
    roster = Roster()
    assert roster.look({TWO: NOT_READY, ONE: REFUSED}) == (ONE, TWO)
    assert roster.num_ready == 0
    assert roster.look({TWO: READY, ONE: REFUSED}) == (TWO,)
    assert roster.look({}) == ()


def test_two_missed_words_are_forgiven_and_not_three() -> None:
    assert EDGE_SILENT_LOOKS == 3
    roster = Roster()
    both = (ONE, TWO)
    assert roster.look({ONE: READY, TWO: READY}) == both
    assert roster.look({ONE: SILENT, TWO: READY}) == both
    assert roster.look({ONE: SILENT, TWO: READY}) == both
    assert roster.look({ONE: READY, TWO: READY}) == both
    assert roster.look({ONE: SILENT, TWO: READY}) == both, "it has spoken in between"
    assert roster.look({ONE: SILENT, TWO: READY}) == both
    assert roster.look({ONE: SILENT, TWO: READY}) == (TWO,)
    assert roster.look({ONE: SILENT, TWO: READY}) == (TWO,)
    assert roster.look({ONE: READY, TWO: READY}) == both


def test_who_never_said_that_it_is_ready_is_not_believed() -> None:
    roster = Roster()
    assert roster.look({ONE: SILENT, TWO: READY}) == (TWO,)


def test_who_left_and_comes_back_begins_anew() -> None:
    roster = Roster()
    roster.look({ONE: READY, TWO: READY})
    assert roster.look({TWO: READY}) == (TWO,)
    assert roster.look({ONE: SILENT, TWO: READY}) == (TWO,)


def test_who_goes_without_a_word_is_lost_and_who_takes_leave_is_not() -> None:
    roster = Roster()
    roster.look({ONE: READY, TWO: READY, THREE: READY})
    roster.look({ONE: NOT_READY, TWO: READY, THREE: READY})
    roster.look({ONE: REFUSED, TWO: READY, THREE: READY})
    roster.look({TWO: READY, THREE: READY})
    assert roster.num_lost == 0, "the first has taken leave"
    roster.look({TWO: REFUSED, THREE: SILENT})
    assert roster.num_lost == 1, "the second is dead, of the third nobody knows yet"
    roster.look({THREE: SILENT})
    roster.look({})
    assert roster.num_lost == 2
    roster.look({TWO: READY})
    roster.look({})
    assert roster.num_lost == 3, "it had come back"


@pytest.mark.parametrize(
    ("sayings", "num_lost"),
    [
        (("ready a", "ready a", "not ready a", "not ready b", "ready b"), 0),
        (("ready a", "not ready a", "refused", "ready b"), 0),
        (("ready a", "not ready b", "ready b"), 1),
        (("ready a", "silent", "not ready b", "ready b"), 1),
        (("ready a", "silent", "ready b"), 1),
        (("ready a", "ready b", "ready c"), 2),
        (("ready a", "refused", "not ready b", "ready b"), 1),
        (("ready a", "silent", "silent", "silent", "not ready b", "ready b"), 1),
        (("ready a", "silent", "ready a"), 0),
        (("ready a", "silent", "not ready a"), 0),
        (("ready", "not ready", "ready", "silent", "ready"), 0),
        (("ready", "ready b", "not ready", "ready a", "not ready a"), 0),
    ],
)
def test_another_process_is_no_leave_of_the_one_before_it(sayings: tuple[str, ...], num_lost: int) -> None:
    """A container may be back a second after it was killed. Without names there is only what was said."""
    roster = Roster()
    for saying in sayings:
        words = saying.split()
        process = words.pop() if len(words[-1]) == 1 else ""
        roster.look({ONE: Saying(Word["_".join(words).upper()], process), TWO: READY})
    assert roster.num_lost == num_lost


PROCESSES = st.sampled_from(["", "a", "b"])
SAYINGS = st.builds(Saying, st.sampled_from([Word.READY, Word.NOT_READY]), PROCESSES) | st.sampled_from(
    [REFUSED, SILENT]
)


@given(st.lists(st.dictionaries(st.sampled_from([ONE, TWO, THREE]), SAYINGS), max_size=12))
def test_the_list_holds_what_its_table_says(looks: list[dict[Address, Saying]]) -> None:
    roster = Roster()
    for number, sayings in enumerate(looks):
        listed = roster.look(sayings)
        assert set(listed) <= set(sayings) and list(listed) == sorted(set(listed))
        assert bool(listed) == bool(sayings)
        ready = {address for address, saying in sayings.items() if saying.word is Word.READY}
        assert ready <= set(listed)
        if ready:
            late = set(listed) - ready
            before = looks[max(number - EDGE_SILENT_LOOKS + 1, 0) : number]
            for each in late:
                words = [look[each].word for look in before if each in look]
                assert sayings[each] is SILENT and Word.READY in words
