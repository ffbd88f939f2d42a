"""The memory of own placements, against a plain list of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.index.boundaries import Boundaries
from prefixcache.limits import RECENT_PLACEMENTS
from proxy.recent_placements import RecentPlacements, WorkerProcess

A, B = WorkerProcess("a", 1.0), WorkerProcess("b", 1.0)


def _chain(prompt: str, blocks: int) -> list[int]:
    """Chained names: equal prompts have equal blocks, and a prefix has those of its beginning."""
    return [int.from_bytes(prompt[: depth + 1].encode()) for depth in range(blocks)]


def test_the_next_turn_of_a_chat_finds_the_one_before() -> None:
    recent = RecentPlacements()
    chat = "x" * 100
    recent.record(Boundaries.of(_chain(chat, 37)), A)
    assert recent.depths(_chain(chat, 90)) == {A: 37}, "its end was no boundary of a longer chain"
    assert recent.depths(_chain(chat, 30)) == {A: 24}
    assert recent.depths([]) == recent.depths(_chain("other", 5)) == {}


def test_of_several_workers_each_has_its_depth() -> None:
    recent = RecentPlacements()
    recent.record(Boundaries.of(_chain("ssssaaaaaaaa", 12)), A)
    recent.record(Boundaries.of(_chain("ssssbbbb", 8)), B)
    assert recent.depths(_chain("ssssaaaaaaaa", 12)) == {A: 12, B: 4}
    assert recent.depths(_chain("ssssbbbb", 8)) == {B: 8}, "what they share went to b last"


def test_what_came_after_a_moment() -> None:
    recent = RecentPlacements()
    chat = Boundaries.of(_chain("x" * 37, 37))
    recent.record(Boundaries.of(_chain("x" * 20, 20)), A)
    moment = recent.num_recorded
    assert recent.depth_since(chat, A, moment) == 0, "that was before"
    recent.record(Boundaries.of(_chain("x" * 9, 9)), B)
    assert (recent.depth_since(chat, B, moment), recent.depth_since(chat, A, moment)) == (8, 0)
    recent.record(Boundaries.of(_chain("x" * 12, 12)), A)
    assert recent.depth_since(chat, A, moment) == 12
    assert recent.depth_since(chat, A, recent.num_recorded) == 0
    assert recent.depth_since(Boundaries.of(_chain("other", 5)), A, 0) == 0


def test_a_worker_that_was_started_anew_has_nothing() -> None:
    recent = RecentPlacements()
    recent.record(Boundaries.of(_chain("x" * 8, 8)), A)
    assert WorkerProcess("a", 2.0) not in recent.depths(_chain("x" * 8, 8))


def test_a_block_that_is_placed_again_stays_and_of_a_chain_the_shallow_ones_stay_longest() -> None:
    recent = RecentPlacements(capacity=6)
    recent.record(Boundaries.of([1, 2, 3]), A)
    recent.record(Boundaries.of([11, 12, 13]), A)
    recent.record(Boundaries.of([1, 2, 3]), A)
    recent.record(Boundaries.of([21, 22]), A)
    assert len(recent) == 6
    assert recent.depths([1, 2, 3]) == {A: 3}
    assert recent.depths([11, 12, 13]) == {A: 1}


@given(
    st.lists(st.tuples(st.text("xy", min_size=1, max_size=40), st.sampled_from([A, B])), max_size=20),
    st.text("xy", min_size=1, max_size=40),
    st.integers(1, 60),
)
def test_it_says_what_a_list_of_the_last_placements_says(
    placed: list[tuple[str, WorkerProcess]], asked: str, capacity: int
) -> None:
    recent = RecentPlacements(capacity=capacity)
    writes: list[tuple[int, WorkerProcess]] = []
    for prompt, process in placed:
        boundaries = Boundaries.of(_chain(prompt, len(prompt)))
        recent.record(boundaries, process)
        writes += [(block, process) for block in reversed(boundaries.hashes)]
        assert len(recent) <= capacity
    kept: dict[int, WorkerProcess] = {}
    for block, process in reversed(writes):
        if len(kept) < capacity:
            kept.setdefault(block, process)
    expected: dict[WorkerProcess, int] = {}
    for depth, block in enumerate(_chain(asked, len(asked)), start=1):
        if block in kept:
            expected[kept[block]] = depth
    assert recent.depths(_chain(asked, len(asked))) == expected


def test_its_bound_is_a_limit_of_the_project() -> None:
    recent = RecentPlacements()
    recent.record(Boundaries(depths=(), hashes=tuple(range(RECENT_PLACEMENTS + 10))), A)
    assert len(recent) == RECENT_PLACEMENTS
