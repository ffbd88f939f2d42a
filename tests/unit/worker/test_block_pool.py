"""The block pool: reuse by content, eviction of leaves, and its own account of itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixcache.errors import IntegrityError
from prefixcache.hashing import next_hash
from prefixcache.types import pack_tokens
from tests.support.manual_clock import ManualClock
from worker.block_pool import BlockPool

ROOT = 7
STRIDE = 2


class Tables:
    """A pool and the tables of its users; contents are single letters."""

    def __init__(self, num_blocks: int) -> None:
        self.clock = ManualClock()
        self.pool = BlockPool(num_blocks, stride=STRIDE, clock=self.clock)
        self.tables: list[list[int]] = []

    def hashes(self, letters: str, root: int = ROOT) -> list[int]:
        values, parent = [], root
        for letter in letters:
            parent = next_hash(parent, letter.encode())
            values.append(parent)
        return values

    def find(self, letters: str, root: int = ROOT) -> list[int]:
        """The blocks held of a prefix."""
        found: list[int] = []
        for letter, value in zip(letters, self.hashes(letters, root), strict=True):
            parent = found[-1] if found else None
            block = self.pool.find(parent, value=value, token_ids=letter.encode(), root=root)
            if block is None:
                break
            found.append(block)
        return found

    def compute(self, letters: str, root: int = ROOT) -> list[int]:
        """A user that reuses nothing, computes all blocks and registers them."""
        table = self.pool.allocate(len(letters))
        assert table is not None
        self.tables.append(table)
        self.register(table, letters, root)
        return table

    def register(self, table: list[int], letters: str, root: int = ROOT) -> list[bool]:
        return [
            self.pool.register(table, position, value=value, token_ids=letter.encode(), root=root)
            for position, (letter, value) in enumerate(zip(letters, self.hashes(letters, root), strict=True))
        ]

    def keep(self, table: list[int], position: int, tokens: bytes, root: int = ROOT) -> None:
        self.pool.keep(table, position, token_ids=tokens, root=root)

    def begins(self, parent: int | None, tokens: bytes, root: int = ROOT) -> tuple[int, int] | None:
        return self.pool.find_beginning(parent, token_ids=tokens, root=root)

    def leave(self, table: list[int]) -> None:
        self.pool.release(table)
        self.tables = [other for other in self.tables if other is not table]

    def check(self) -> None:
        self.pool.check_integrity(self.tables)


@pytest.fixture
def users() -> Iterator[Tables]:
    tables = Tables(8)
    yield tables
    tables.check()


def test_a_prefix_is_found_block_by_block(users: Tables) -> None:
    table = users.compute("abc")
    assert users.find("abc") == table
    assert users.find("abx") == table[:2]
    assert users.find("b") == []


def test_the_age_is_that_of_the_block_that_is_evicted_next(users: Tables) -> None:
    """
    root ── a ── b ── c        released at 1, a and b once more at 3
         └─ x ── y             released at 2
    """
    assert users.pool.evicted_next_used_at is None
    first = users.compute("abc")
    assert users.pool.evicted_next_used_at is None, "it is in use"
    users.clock.now = 1
    users.leave(first)
    assert users.pool.evicted_next_used_at == 1
    users.clock.now = 2
    users.leave(users.compute("xy"))
    again = users.find("ab")
    users.pool.hold(again)
    users.tables.append(again)
    users.clock.now = 3
    assert users.pool.evicted_next_used_at == 1, "c was not used again"
    users.leave(again)
    ages: list[float] = []
    while (used_at := users.pool.evicted_next_used_at) is not None:
        assert users.pool.evicted_next_used_at == used_at
        ages.append(used_at)
        evictions = users.pool.num_evictions
        taken = users.pool.allocate(users.pool.num_free + 1)
        assert taken is not None and users.pool.num_evictions == evictions + 1
        users.tables.append(taken)
        users.check()
    assert ages == [1, 2, 2, 3, 3]


def test_a_block_of_another_root_is_not_believed_even_under_the_same_hash(users: Tables) -> None:
    table = users.compute("a")
    value = users.hashes("a")[0]
    assert users.pool.find(None, value=value, token_ids=b"a", root=ROOT) == table[0]
    assert users.pool.find(None, value=value, token_ids=b"a", root=ROOT + 1) is None


def test_other_content_or_another_parent_under_the_same_hash_is_not_believed(users: Tables) -> None:
    table = users.compute("ab")
    value = users.hashes("ab")[1]
    assert users.pool.find(table[0], value=value, token_ids=b"b", root=ROOT) == table[1]
    assert users.pool.find(table[0], value=value, token_ids=b"x", root=ROOT) is None
    assert users.pool.find(None, value=value, token_ids=b"b", root=ROOT) is None


def test_a_duplicate_gives_way_to_the_block_that_was_first(users: Tables) -> None:
    first = users.compute("ab")
    second = users.compute("ab")
    assert second == first
    assert users.pool.num_in_use == 2
    assert users.pool.num_free == 6


def test_a_collision_is_not_registered_and_neither_are_its_children(users: Tables) -> None:
    users.compute("a")
    table = users.pool.allocate(2)
    assert table is not None
    users.tables.append(table)
    collision = users.hashes("a")[0]
    assert not users.pool.register(table, 0, value=collision, token_ids=b"x", root=ROOT)
    assert not users.pool.register(table, 1, value=1, token_ids=b"y", root=ROOT)
    users.check()
    users.leave(table)
    assert users.pool.num_free == 7


def test_released_blocks_stay_findable_until_their_place_is_needed(users: Tables) -> None:
    users.leave(users.compute("abc"))
    assert (users.pool.num_free, users.pool.num_idle, users.pool.num_in_use) == (5, 3, 0)
    assert len(users.find("abc")) == 3
    assert users.pool.count_idle(users.find("abc")) == 3
    users.compute("mnopqr")
    assert len(users.find("abc")) == 2


def test_leaves_go_first_the_least_recently_used_and_the_deepest_among_equals(users: Tables) -> None:
    old = users.compute("abc")
    users.leave(old)
    users.leave(users.compute("xy"))
    held = users.pool.allocate(4)
    assert held is not None
    users.tables.append(held)
    assert (len(users.find("abc")), len(users.find("xy"))) == (2, 2)
    more = users.pool.allocate(2)
    assert more is not None
    users.tables.append(more)
    assert (len(users.find("abc")), len(users.find("xy"))) == (0, 2)


def test_use_makes_a_prefix_young_again(users: Tables) -> None:
    users.leave(users.compute("ab"))
    users.leave(users.compute("xy"))
    again = users.find("ab")
    users.pool.hold(again)
    users.tables.append(again)
    users.leave(again)
    users.compute("mnopq")
    assert (len(users.find("ab")), len(users.find("xy"))) == (2, 1)


def test_a_block_in_use_and_its_ancestors_are_never_evicted(users: Tables) -> None:
    users.leave(users.compute("abc"))
    held = users.find("ab")
    users.pool.hold(held)
    users.tables.append(held)
    assert users.pool.num_available == 6
    assert users.pool.allocate(7) is None
    rest = users.pool.allocate(6)
    assert rest is not None
    users.tables.append(rest)
    assert users.find("abc") == held
    assert users.pool.allocate(1) is None


def begun(users: Tables, letters: str, *ids: int, root: int = ROOT) -> int:
    """A user of these blocks and one that is not full, which ends; that one."""
    table = users.pool.allocate(len(letters) + 1)
    assert table is not None
    users.tables.append(table)
    assert all(users.register(table[:-1], letters, root))
    users.keep(table, len(letters), pack_tokens(ids), root)
    last = table[-1]
    users.leave(table)
    return last


def test_a_block_that_is_not_full_is_found_by_what_it_begins_with(users: Tables) -> None:
    kept = begun(users, "a", 5, 6, 7)
    (parent,) = users.find("a")
    assert users.begins(parent, pack_tokens([5, 6, 7, 8])) == (kept, 3)
    assert users.begins(parent, pack_tokens([5, 6, 9])) == (kept, 2)
    assert users.begins(parent, pack_tokens([5])) == (kept, 1)
    assert users.begins(parent, pack_tokens([9, 6, 7])) is None
    assert users.begins(parent, b"") is None
    assert users.begins(None, pack_tokens([5, 6])) is None
    assert (users.pool.num_idle, users.pool.num_registered) == (2, 1)


def test_a_full_block_is_found_by_what_it_begins_with(users: Tables) -> None:
    table = users.pool.allocate(1)
    assert table is not None
    users.tables.append(table)
    assert users.pool.register(table, 0, value=1, token_ids=pack_tokens([5, 6, 7, 8]), root=ROOT)
    assert users.begins(None, pack_tokens([5, 6, 9])) == (table[0], 2)
    assert users.begins(None, pack_tokens([5, 6, 9]), root=ROOT + 1) is None


def test_beginnings_of_other_roots_are_apart(users: Tables) -> None:
    first, second = begun(users, "", 5, root=1), begun(users, "", 5, root=2)
    assert users.begins(None, pack_tokens([5]), root=1) == (first, 1)
    assert users.begins(None, pack_tokens([5]), root=2) == (second, 1)
    assert users.begins(None, pack_tokens([5]), root=3) is None


def test_of_blocks_that_are_not_full_each_parent_has_the_newest_one(users: Tables) -> None:
    begun(users, "", 5, 6)
    newest = begun(users, "", 5, 7)
    assert users.begins(None, pack_tokens([5, 6])) == (newest, 1)
    assert (users.pool.num_idle, users.pool.num_free) == (1, 7)
    full = users.compute("a")
    assert users.begins(None, pack_tokens([5, 6])) is None, "the full one is newer"
    assert users.pool.num_free == 7
    users.leave(full)


def test_what_is_known_already_is_not_kept_twice(users: Tables) -> None:
    longer = begun(users, "", 5, 6, 7)
    again = users.pool.allocate(1)
    assert again is not None
    users.tables.append(again)
    users.keep(again, 0, pack_tokens([5, 6]))
    users.leave(again)
    assert users.begins(None, pack_tokens([5, 6, 7])) == (longer, 3)
    assert (users.pool.num_idle, users.pool.num_free) == (1, 7)


def test_nothing_is_kept_behind_a_block_without_a_name(users: Tables) -> None:
    table = users.pool.allocate(2)
    assert table is not None
    users.tables.append(table)
    users.keep(table, 1, pack_tokens([5]))
    users.leave(table)
    assert users.pool.num_free == 8


def test_a_block_that_is_not_full_goes_before_its_parent(users: Tables) -> None:
    begun(users, "ab", 5)
    taken = users.pool.allocate(6)
    assert taken is not None
    users.tables.append(taken)
    (_, parent) = users.find("ab")
    assert users.begins(parent, pack_tokens([5])) is None
    assert users.pool.num_evictions == 1
    assert users.pool.index_changes.held() == {users.hashes("ab")[1]}, "it was never told to the index"


def test_one_that_is_held_outlives_a_newer_one(users: Tables) -> None:
    """Whoever copies from it holds it until nothing can be allocated any more before the copy."""
    held = begun(users, "", 5, 6)
    users.pool.hold([held])
    users.tables.append([held])
    begun(users, "", 5, 7)
    rest = users.pool.allocate(7)
    assert rest is not None and held not in rest
    users.tables.append(rest)
    users.leave(users.tables[0])
    assert users.pool.allocate(1) == [held]
    users.tables.append([held])


def test_index_changes_name_full_index_blocks_only(users: Tables) -> None:
    users.leave(users.compute("abcde"))
    hashes = users.hashes("abcde")
    assert users.pool.index_changes.take(10) == ([hashes[1], hashes[3]], [])
    users.compute("mnopq")
    stored, removed = users.pool.index_changes.take(10)
    assert removed == [hashes[3]]
    assert len(stored) == 2


def test_the_heap_of_leaves_does_not_grow_with_use(users: Tables) -> None:
    users.leave(users.compute("ab"))
    for _ in range(1_000):
        table = users.find("ab")
        users.pool.hold(table)
        users.tables.append(table)
        users.leave(table)
    assert len(users.pool._leaves) <= 2 * users.pool.num_blocks + 65
    users.compute("mnopqrst")
    assert users.find("ab") == []


@pytest.mark.parametrize(
    "damage", ["ref_count", "hash", "child", "newest", "root", "parent", "free", "idle", "leaf", "index"]
)
def test_check_integrity_sees_damage(damage: str) -> None:
    users = Tables(6)
    users.leave(users.compute("ab"))
    table = users.compute("xy")
    users.check()
    pool = users.pool
    block = pool._blocks[table[1]]
    match damage:
        case "ref_count":
            block.ref_count += 1
        case "hash":
            assert block.hash is not None
            del pool._by_hash[block.hash]
        case "child":
            pool._blocks[table[0]].num_children = 0
        case "newest":
            block.newest_child = block
        case "root":
            pool._newest_of_root[ROOT + 1] = block
        case "parent":
            block.parent = None
        case "free":
            pool._free.pop()
        case "idle":
            pool._num_idle += 1
        case "leaf":
            pool._leaves.clear()
        case "index":
            pool.index_changes.remove(users.hashes("xy")[1])
    with pytest.raises(IntegrityError):
        users.check()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a dumb truth: which prefixes were computed, when they were last used, who holds what."""

    @initialize(num_blocks=st.integers(3, 12))
    def begin(self, num_blocks: int) -> None:
        self.users = Tables(num_blocks)
        self.pool = self.users.pool
        self.texts: dict[int, str] = {}
        """Text of each user's table, by the identity of the table."""
        self.cached: dict[str, int] = {}
        """Prefix -> time of its last release; what the pool must know of, idle or in use."""
        self.told: set[int] = set()
        self.now = 0

    def _in_use(self) -> set[str]:
        return {text[:length] for text in self.texts.values() for length in range(1, len(text) + 1)}

    def _evict(self, count: int) -> None:
        for _ in range(count):
            in_use = self._in_use()
            leaves = [
                prefix
                for prefix in self.cached
                if prefix not in in_use and not any(len(o) == len(prefix) + 1 and o[:-1] == prefix for o in self.cached)
            ]
            oldest = min(self.cached[leaf] for leaf in leaves)
            among = [leaf for leaf in leaves if self.cached[leaf] == oldest]
            deepest = max(map(len, among))
            candidates = [leaf for leaf in among if len(leaf) == deepest]
            gone = [leaf for leaf in candidates if len(self.users.find(leaf)) < len(leaf)]
            assert gone, f"none of {candidates} was evicted"
            del self.cached[gone[0]]

    @rule(text=st.text("ab", min_size=1, max_size=6))
    def serve(self, text: str) -> None:
        """A request: reuses what is there, computes the rest, registers it and keeps it."""
        found = self.users.find(text)
        held = [prefix for prefix in (text[:n] for n in range(1, len(text) + 1)) if prefix in self.cached]
        assert len(found) == len(held)
        missing = len(text) - len(found)
        self.pool.hold(found)
        fresh = self.pool.allocate(missing)
        if fresh is None:
            assert missing > self.pool.num_available
            self.pool.release(found)
            self._touch(text[: len(found)])
            return
        self.users.tables.append(table := found + fresh)
        self.texts[id(table)] = text[: len(found)]
        self._evict(missing - self._num_free_before(missing))
        for position in range(len(found), len(text)):
            letters = text[: position + 1]
            assert self.pool.register(
                table,
                position,
                value=self.users.hashes(letters)[-1],
                token_ids=letters[-1].encode(),
                root=ROOT,
            )
            self.cached[letters] = 0
        self.texts[id(table)] = text

    def _num_free_before(self, missing: int) -> int:
        known = len(self.cached)
        return min(missing, self.pool.num_blocks - known)

    def _touch(self, text: str) -> None:
        if not text:
            return
        self.now += 1
        for length in range(1, len(text) + 1):
            self.cached[text[:length]] = self.now

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if not self.users.tables:
            return
        table = data.draw(st.sampled_from(self.users.tables))
        self.users.leave(table)
        self._touch(self.texts.pop(id(table)))

    @rule(limit=st.integers(1, 4))
    def publish(self, limit: int) -> None:
        stored, removed = self.pool.index_changes.take(limit)
        self.told = (self.told | set(stored)) - set(removed)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "users"):
            return
        self.users.check()
        assert self.pool.num_registered == len(self.cached)
        assert self.pool.num_in_use == len(self._in_use())
        expected = {self.users.hashes(prefix)[-1] for prefix in self.cached if len(prefix) % STRIDE == 0}
        assert self.pool.index_changes.held() == expected
        if not self.pool.index_changes:
            assert self.told == expected


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
