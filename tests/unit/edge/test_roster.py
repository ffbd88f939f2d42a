"""Who stands in the list, look by look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge.address import Address
from edge.roster import Roster, Word
from prefixcache.limits import EDGE_SILENT_LOOKS

ONE, TWO, THREE = (Address(f"10.0.0.{number}", 8000) for number in (1, 2, 3))
READY, NOT_READY, REFUSED, SILENT = Word


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


def test_one_missed_word_is_forgiven_and_not_two() -> None:
    assert EDGE_SILENT_LOOKS == 2
    roster = Roster()
    both = (ONE, TWO)
    assert roster.look({ONE: READY, TWO: READY}) == both
    assert roster.look({ONE: SILENT, TWO: READY}) == both
    assert roster.look({ONE: READY, TWO: READY}) == both
    assert roster.look({ONE: SILENT, TWO: READY}) == both, "it has spoken in between"
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


@given(st.lists(st.dictionaries(st.sampled_from([ONE, TWO, THREE]), st.sampled_from(list(Word))), max_size=12))
def test_the_list_holds_what_its_table_says(looks: list[dict[Address, Word]]) -> None:
    roster = Roster()
    for number, words in enumerate(looks):
        listed = roster.look(words)
        assert set(listed) <= set(words) and list(listed) == sorted(set(listed))
        assert bool(listed) == bool(words)
        ready = {address for address, word in words.items() if word is READY}
        assert ready <= set(listed)
        if ready:
            late = set(listed) - ready
            before = looks[number - 1] if number else {}
            assert all(words[address] is SILENT and before.get(address) is READY for address in late)
