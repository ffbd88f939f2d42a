"""The block pool: which KV block holds what, who uses it, and which one gives way.

             allocate                      register                      release (last user)
    free ───────────────► in use, unnamed ───────────► in use, findable ─────────────────────► cached-idle
     ▲                        │ release                                ◄───────────────────────    │
     └────────────────────────┴──────────────────────────────────────  hold                        │
     ▲                                                                                             │
     └──────────────────── evict (a leaf only: no registered child) ◄──────────────────────────────┘

Registered blocks form radix trees: a child is found by the chained hash of its whole prefix and believed only if its
token ids, its parent block and its root are the expected ones.

    root ── [b3 | "the"] ── [b7 | "cat"] ── [b1 | "sat"]        evicted in this order: b1 or b4, then b7, then b3
                                       └─── [b4 | "ran"]

A request holds a reference on every block of its table, and its registered blocks are a path from the root. So below an
idle block every block is idle: all idle blocks can be evicted, leaf by leaf.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prefixcache.errors import IntegrityError
from worker.index_changes import IndexChanges


@dataclass(slots=True, eq=False)
class Block:
    """One KV block. `hash` is None until its content is registered; only then do the fields after it mean anything."""

    id: int
    ref_count: int = 0
    hash: int | None = None
    parent: Block | None = field(default=None, repr=False)
    """None for the first block of a prefix."""
    root: int = 0
    token_ids: bytes = field(default=b"", repr=False)
    depth: int = 0
    """Blocks before it in its prefix."""
    num_children: int = 0
    """Registered blocks whose parent it is."""
    registered_at: int = 0
    last_use: int = 0
    """Number of its latest release, in the order of all of them."""
    last_use_at: float = 0.0
    """Time of that release."""

    @property
    def is_evictable(self) -> bool:
        return self.hash is not None and not self.ref_count and not self.num_children

    def is_continuation(self, parent: Block | None, root: int, token_ids: bytes) -> bool:
        """Whether it may stand for these tokens after this parent: what decides once a hash was found."""
        return self.parent is parent and self.root == root and self.token_ids == token_ids


class BlockPool:
    """Owns all blocks. Not thread-safe: the step thread alone calls it; `index_changes` is what others may use."""

    def __init__(self, num_blocks: int, *, stride: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.index_changes = IndexChanges()
        self.num_evictions = 0
        self._stride = stride
        self._blocks = [Block(id=number) for number in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_hash: dict[int, Block] = {}
        self._leaves: list[tuple[int, int, int]] = []
        """Heap of (last use, -depth, id): oldest first, deepest first among equals. An entry may be outdated."""
        self._num_idle = 0
        self._now = clock
        self._num_changes = 0
        """Orders releases and registrations: two of one moment have different numbers."""

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks without a user whose content can be found."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + self._num_idle

    @property
    def num_in_use(self) -> int:
        return len(self._blocks) - self.num_available

    @property
    def num_registered(self) -> int:
        return len(self._by_hash)

    @property
    def version(self) -> int:
        """Grows with every block that becomes findable and with every one that is evicted."""
        return len(self._by_hash) + 2 * self.num_evictions

    @property
    def evicted_next_used_at(self) -> float | None:
        """When the block that is evicted next was used last; None if none can be. Cheap: one look, as a rule."""
        block = self._next_evicted()
        return None if block is None else block.last_use_at

    def count_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these findable blocks have no user, so that holding them makes fewer blocks available."""
        return sum(not self._blocks[block_id].ref_count for block_id in block_ids)

    # --- finding and holding --------------------------------------------------------------------------------

    def find(self, parent_id: int | None, *, value: int, token_ids: bytes, root: int) -> int | None:
        """The block with chained hash `value`, if its content, its parent and its root are these.

        Takes no reference: `hold` it before anything is allocated.
        """
        block = self._by_hash.get(value)
        parent = None if parent_id is None else self._blocks[parent_id]
        if block is None or not block.is_continuation(parent, root, token_ids):
            return None
        return block.id

    def is_findable(self, value: int) -> bool:
        """Whether a block stands under that chained hash, so that those before it in the chain do, too.

        For estimates: whether it may be reused is for `find` to say, which looks at its content.
        """
        return value in self._by_hash

    def hold(self, block_ids: Iterable[int]) -> None:
        """Takes a reference on each block."""
        for block_id in block_ids:
            self._change_ref_count(self._blocks[block_id], 1)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks without content, one reference each; evicts where none is free. None if there are too few."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._evict_one()
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._change_ref_count(self._blocks[block_id], 1)
        return taken

    def release(self, table: Sequence[int]) -> None:
        """Gives back one reference on each block of a request's table."""
        self._num_changes += 1
        now = self._now()
        for block_id in reversed(table):
            block = self._blocks[block_id]
            block.last_use, block.last_use_at = self._num_changes, now
            self._change_ref_count(block, -1)

    # --- registering ----------------------------------------------------------------------------------------

    def register(self, table: list[int], position: int, *, value: int, token_ids: bytes, root: int) -> bool:
        """Makes the computed block table[position] findable under the chained hash `value`.

        already there     the same content under the same parent: the table is switched to that block, this one freed
        new               True as well
        collision         other content under that hash: False, the block stays unnamed
        parent unnamed    False, for then nothing could tell whose child it is
        """
        block = self._blocks[table[position]]
        assert block.hash is None and block.ref_count == 1
        parent = self._blocks[table[position - 1]] if position else None
        if parent is not None and parent.hash is None:
            return False
        present = self._by_hash.get(value)
        if present is not None:
            if not present.is_continuation(parent, root, token_ids):
                return False
            self._change_ref_count(present, 1)
            table[position] = present.id
            self._change_ref_count(block, -1)
            return True
        self._num_changes += 1
        block.hash, block.parent, block.root, block.token_ids = value, parent, root, token_ids
        block.depth, block.registered_at = position, self._num_changes
        self._by_hash[value] = block
        if parent is not None:
            parent.num_children += 1
        if self._ends_index_block(block):
            self.index_changes.store(value)
        return True

    # --- state changes, each in one place -------------------------------------------------------------------

    def _change_ref_count(self, block: Block, change: int) -> None:
        was_idle = block.hash is not None and not block.ref_count
        block.ref_count += change
        assert block.ref_count >= 0
        if block.ref_count:
            self._num_idle -= was_idle
        elif block.hash is None:
            self._free.append(block.id)
        else:
            self._num_idle += 1
            self._offer_leaf(block)

    def _offer_leaf(self, block: Block) -> None:
        if not block.is_evictable:
            return
        heapq.heappush(self._leaves, (block.last_use, -block.depth, block.id))
        if len(self._leaves) > 2 * len(self._blocks) + 64:
            self._leaves = [(leaf.last_use, -leaf.depth, leaf.id) for leaf in self._blocks if leaf.is_evictable]
            heapq.heapify(self._leaves)

    def _next_evicted(self) -> Block | None:
        """The least recently used leaf, left at the head of the heap; outdated entries before it are dropped."""
        while self._leaves:
            last_use, _, block_id = self._leaves[0]
            block = self._blocks[block_id]
            if block.is_evictable and block.last_use == last_use:
                return block
            heapq.heappop(self._leaves)
        return None

    def _evict_one(self) -> None:
        """Frees the least recently used leaf and forgets its hash. There must be an idle block."""
        block = self._next_evicted()
        assert block is not None and block.hash is not None
        heapq.heappop(self._leaves)
        del self._by_hash[block.hash]
        if self._ends_index_block(block):
            self.index_changes.remove(block.hash)
        parent, block.parent, block.hash, block.token_ids = block.parent, None, None, b""
        self._num_idle -= 1
        self._free.append(block.id)
        self.num_evictions += 1
        if parent is not None:
            parent.num_children -= 1
            self._offer_leaf(parent)

    def _ends_index_block(self, block: Block) -> bool:
        return block.depth % self._stride == self._stride - 1

    # --- integrity ------------------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises IntegrityError unless every invariant holds; `tables` are those of all requests. Reads everything."""
        self._check_states(tables)
        self._check_tree()
        self._check_eviction_order()

    def _check_states(self, tables: Iterable[Sequence[int]]) -> None:
        users = Counter(block_id for table in tables for block_id in table)
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError(f"a block is twice in the free list: {sorted(self._free)}")
        for block in self._blocks:
            if block.ref_count != users[block.id]:
                raise IntegrityError(f"{block} has {users[block.id]} users, not {block.ref_count}")
            is_free = block.hash is None and not block.ref_count
            if is_free != (block.id in free):
                raise IntegrityError(f"{block} is wrongly in or not in the free list")
        idle = sum(block.hash is not None and not block.ref_count for block in self._blocks)
        in_use = sum(block.ref_count > 0 for block in self._blocks)
        if idle != self._num_idle:
            raise IntegrityError(f"{idle} blocks are idle, counted {self._num_idle}")
        if len(free) + idle + in_use != len(self._blocks):
            raise IntegrityError(f"{len(free)} free + {idle} idle + {in_use} in use")

    def _check_tree(self) -> None:
        registered = [block for block in self._blocks if block.hash is not None]
        children = Counter(block.parent.id for block in registered if block.parent is not None)
        if len(registered) != len(self._by_hash):
            raise IntegrityError("hash table and blocks differ in number")
        for block in self._blocks:
            if block.num_children != children[block.id]:
                raise IntegrityError(f"{block.id} has {children[block.id]} children")
        for block in registered:
            assert block.hash is not None
            if self._by_hash.get(block.hash) is not block:
                raise IntegrityError(f"hash {block.hash:x} does not lead to block {block.id}")
            if (block.parent is None) != (block.depth == 0):
                raise IntegrityError(f"block {block.id}: depth {block.depth}")
            if (parent := block.parent) is not None:
                if parent.hash is None:
                    raise IntegrityError(f"block {block.id}: its parent {parent.id} is not registered")
                if parent.registered_at >= block.registered_at:
                    raise IntegrityError(f"block {block.id} is older than its parent")
                if parent.depth + 1 != block.depth:
                    raise IntegrityError(f"block {block.id}: depth {block.depth}")
                if parent.root != block.root:
                    raise IntegrityError(f"block {block.id} has another root than its parent")
                if block.ref_count and not parent.ref_count:
                    raise IntegrityError(f"block {block.id} in use, its parent idle")
        held = {block.hash for block in registered if self._ends_index_block(block)}
        if held != self.index_changes.held():
            raise IntegrityError("the index changes know other hashes than the blocks")

    def _check_eviction_order(self) -> None:
        entries = set(self._leaves)
        for block in self._blocks:
            listed = (block.last_use, -block.depth, block.id) in entries
            if block.is_evictable and not listed:
                raise IntegrityError(f"block {block.id} is evictable and not in the heap")
