from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from prefixcache.rendering.stop_strings import StopScanner
from tests.support.cuts import cut

ALPHABET = "ab\n日🙂"
stops_of = st.lists(st.text(ALPHABET, min_size=1, max_size=6), max_size=5)


def truth(stops: list[str], text: str) -> tuple[str, bool]:
    """The text before the stop string that is complete first, the longest of those that are."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def scan(stops: list[str], parts: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    emitted = ""
    matched = False
    for part in parts:
        text, matched = scanner.feed(part)
        emitted += text
    return emitted + scanner.flush(), matched


@given(stops_of, st.text(ALPHABET, max_size=60), st.data())
@example(["aab"], "aaab", None)
@example(["abab", "ba"], "aabab", None)
def test_any_cuts_give_the_truth(stops: list[str], text: str, data: st.DataObject | None) -> None:
    parts = list(text) if data is None else cut(text, data)
    assert scan(stops, parts) == truth(stops, text)


@given(stops_of, st.text(ALPHABET, max_size=60))
def test_all_that_cannot_begin_a_stop_string_is_emitted_at_once(stops: list[str], text: str) -> None:
    scanner = StopScanner(stops)
    emitted = ""
    for end, char in enumerate(text, start=1):
        part, matched = scanner.feed(char)
        emitted += part
        if matched:
            break
        begins = [size for stop in stops for size in range(1, len(stop)) if text[:end].endswith(stop[:size])]
        assert emitted == text[: end - max(begins, default=0)]


def test_a_held_beginning_is_released_by_the_flush_once() -> None:
    scanner = StopScanner(["STOP"])
    assert scanner.feed("go ST") == ("go ", False)
    assert scanner.flush() == "ST"
    assert scanner.flush() == ""


def test_nothing_follows_a_match() -> None:
    scanner = StopScanner(["Wednesday, Thurs"])
    assert scanner.feed("Tuesday, Wednes") == ("Tuesday, ", False)
    assert scanner.feed("day, Thursday, Friday") == ("", True)
    assert scanner.feed("more") == ("", True)
    assert scanner.flush() == ""


def test_a_long_stop_string_costs_one_comparison_a_character() -> None:
    scanner = StopScanner(["a" * 1023 + "b"])
    emitted = "".join(scanner.feed("a")[0] for _ in range(20_000))
    assert len(emitted) == 20_000 - 1023
    assert scanner.feed("b") == ("", True)
