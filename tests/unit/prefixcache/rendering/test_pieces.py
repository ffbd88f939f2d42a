from __future__ import annotations

from array import array

import pytest

from prefixcache.rendering.control_tokens import UnmarkedText, unmark
from prefixcache.rendering.pieces import Piece, PieceCache, PieceCutter
from tests.support.seeds import seeded

CUTTER = PieceCutter(added=["<s>", "</s>", "<x>", "<s>>"], control=["<s>", "</s>", "<x>"], cut_after=["<s>", "</s>"])


@pytest.mark.parametrize(
    ("marked", "pieces"),
    [
        ("", []),
        ("abc", [("start", "abc")]),
        ("<s>a</s>", [("start", "<s>"), ("special", "a</s>")]),
        ("a<x>b", [("start", "a<x>b")]),
        ("a<s>>b", [("start", "a<s>>b")]),
        (
            "<s>a\U000f0000</s>b</s>",
            [("start", "<s>"), ("special", "a"), ("spelling", "</s>"), ("text", "b</s>")],
        ),
        ("\U000f0000<s>\U000f0000<x>", [("spelling", "<s>"), ("spelling", "<x>")]),
        ("<\U000f0001s>\n<s>c", [("spelling", "<s>"), ("text", "\n<s>"), ("special", "c")]),
    ],
)
def test_cuts(marked: str, pieces: list[tuple[str, str]]) -> None:
    prompt = unmark(marked)
    assert list(CUTTER.cut(prompt)) == pieces
    assert "".join(text for _, text in pieces) == prompt.text


def test_counts_control_spellings() -> None:
    assert CUTTER.num_control("<s><x>a<s>><y></s") == 2


def entry(text: str, num_ids: int = 1) -> tuple[Piece, array[int]]:
    return Piece("special", text), array("I", range(num_ids))


def test_what_was_stored_is_found_in_its_own_context_only() -> None:
    cache = PieceCache(100_000)
    piece, ids = entry("a", 3)
    cache.store(piece, ids)
    assert cache.lookup([piece, Piece("start", "a"), Piece("special", "b")]) == [ids, None, None]
    assert cache.uncached_chars([piece, Piece("start", "abc"), Piece("special", "bc")]) == 5


def test_the_least_recently_used_piece_goes_first() -> None:
    entries = [entry(str(number)) for number in range(9)]
    cost = PieceCache.ENTRY_BYTES + 4 + 4
    cache = PieceCache(8 * cost)
    for piece, ids in entries[:8]:
        cache.store(piece, ids)
    cache.lookup([entries[0][0]])
    cache.store(*entries[8])
    found = [ids is not None for ids in cache.lookup([piece for piece, _ in entries])]
    assert found == [True, False, *[True] * 7]


def test_memory_stays_within_the_budget() -> None:
    source = seeded("piece cache")
    cache = PieceCache(100_000)
    for _ in range(3000):
        cache.store(*entry(source.choice("abé🙂") * source.randrange(3000), source.randrange(2000)))
        assert 0 <= cache.num_bytes <= 100_000
    assert cache.num_bytes > 50_000


def test_storing_again_counts_once_and_a_huge_piece_is_not_kept() -> None:
    cache = PieceCache(100_000)
    piece, ids = entry("a")
    cache.store(piece, ids)
    size = cache.num_bytes
    cache.store(piece, ids)
    assert cache.num_bytes == size
    cache.store(*entry("x" * 4000))
    assert cache.num_bytes == size


def test_the_entry_cost_is_no_understatement() -> None:
    import tracemalloc

    cache = PieceCache(64 * 1024 * 1024)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(5000):
            cache.store(Piece("special", f"piece {number}"), array("I", range(number % 7)))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= cache.num_bytes


def test_an_empty_prompt_has_no_pieces() -> None:
    assert CUTTER.cut(UnmarkedText(text="", starts=(), joints=())) == ()
