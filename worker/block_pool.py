"""The block pool: which KV block holds what, who uses it, and which one gives way.

             allocate                   register, keep                   release (last user)
    free ───────────────► in use, unnamed ───────────► in use, findable ─────────────────────► cached-idle
     ▲                        │ release                                ◄───────────────────────    │
     └────────────────────────┴──────────────────────────────────────  hold                        │
     ▲                                                                                             │
     └──────────────────── evict (a leaf only: no findable child) ◄────────────────────────────────┘

Registered blocks form radix trees: a child is found by the chained hash of its whole prefix and believed only if its
token ids, its parent block and its root are the expected ones.

    root ── [b3 | "the"] ── [b7 | "cat"] ── [b1 | "sat"]        evicted in this order: b1 or b4, then b7, then b3
                                       └─── [b4 | "ran"]

A request holds a reference on every block of its table, and its registered blocks are a path from the root. So below an
idle block every block is idle: all idle blocks can be evicted, leaf by leaf.

Less than a block is reused by copying it: of what may come after a prefix, the newest child tells with how many tokens
it begins. The last block of a request that ends is seldom full; it is kept as such a child, without a hash of its own.

    root ── [b3 | "the"] ── [b7 | "ca|"]        kept: whoever goes on with "cab" copies two rows of b7 into a block of
                                                its own
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prefixcache.errors import IntegrityError
from prefixcache.types import num_common_tokens
from worker.index_changes import IndexChanges


@dataclass(slots=True, eq=False)
class Block:
    """One KV block. Until its content is findable the fields after `is_findable` mean nothing."""

    id: int
    ref_count: int = 0
    is_findable: bool = False
    hash: int | None = None
    """None of a kept one, which is not full."""
    parent: Block | None = field(default=None, repr=False)
    """None for the first block of a prefix."""
    root: int = 0
    token_ids: bytes = field(default=b"", repr=False)
    depth: int = 0
    """Blocks before it in its prefix."""
    num_children: int = 0
    """Findable blocks whose parent it is."""
    newest_child: Block | None = field(default=None, repr=False)
    """The one that became findable last, if it still is."""
    registered_at: int = 0
    last_use: int = 0
    """Number of its latest release, in the order of all of them."""
    last_use_at: float = 0.0
    """Time of that release."""

    @property
    def is_evictable(self) -> bool:
        return self.is_findable and not self.ref_count and not self.num_children

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
        self._newest_of_root: dict[int, Block] = {}
        """As a block's newest child, for those without a parent."""
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

    def find_beginning(self, parent_id: int | None, *, token_ids: bytes, root: int) -> tuple[int, int] | None:
        """A block to copy from, and how many of these packed tokens it begins with: the newest child of that parent.

        None if it begins with none of them. Takes no reference.
        """
        block = self._newest(None if parent_id is None else self._blocks[parent_id], root)
        num_tokens = 0 if block is None else num_common_tokens(block.token_ids, token_ids)
        return None if block is None or not num_tokens else (block.id, num_tokens)

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
        assert not block.is_findable and block.ref_count == 1
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
        self._name(block, parent, position, token_ids=token_ids, root=root)
        block.hash = value
        self._by_hash[value] = block
        if self._ends_index_block(block):
            self.index_changes.store(value)
        return True

    def keep(self, table: Sequence[int], position: int, *, token_ids: bytes, root: int) -> None:
        """Makes the leading tokens of block table[position], all that is computed of it, findable as a beginning.

        Its user is about to release it, and nobody else may hold it. Left as it is where nothing could tell whose child
        it is, or where the newest child begins with all of them.
        """
        block = self._blocks[table[position]]
        assert not block.is_findable and block.ref_count == 1
        parent = self._blocks[table[position - 1]] if position else None
        if parent is not None and parent.hash is None:
            return
        newest = self._newest(parent, root)
        if newest is None or not newest.token_ids.startswith(token_ids):
            self._name(block, parent, position, token_ids=token_ids, root=root)

    # --- state changes, each in one place -------------------------------------------------------------------

    def _name(self, block: Block, parent: Block | None, depth: int, *, token_ids: bytes, root: int) -> None:
        """Makes it findable. A kept one that nobody finds any more, because this is newer, is freed."""
        self._num_changes += 1
        block.is_findable = True
        block.parent, block.root, block.token_ids = parent, root, token_ids
        block.depth, block.registered_at = depth, self._num_changes
        older = self._newest(parent, root)
        if parent is None:
            self._newest_of_root[root] = block
        else:
            parent.num_children += 1
            parent.newest_child = block
        if older is not None and older.hash is None and not older.ref_count:
            self._forget(older)

    def _newest(self, parent: Block | None, root: int) -> Block | None:
        return self._newest_of_root.get(root) if parent is None else parent.newest_child

    def _forget(self, block: Block) -> None:
        """Frees an idle leaf."""
        if block.hash is not None:
            del self._by_hash[block.hash]
            if self._ends_index_block(block):
                self.index_changes.remove(block.hash)
        parent = block.parent
        if parent is None:
            if self._newest_of_root.get(block.root) is block:
                del self._newest_of_root[block.root]
        elif parent.newest_child is block:
            parent.newest_child = None
        block.is_findable, block.parent, block.hash, block.token_ids = False, None, None, b""
        self._num_idle -= 1
        self._free.append(block.id)
        if parent is not None:
            parent.num_children -= 1
            self._offer_leaf(parent)

    def _change_ref_count(self, block: Block, change: int) -> None:
        was_idle = block.is_findable and not block.ref_count
        block.ref_count += change
        assert block.ref_count >= 0
        if block.ref_count:
            self._num_idle -= was_idle
        elif not block.is_findable:
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
        """Frees the least recently used leaf. There must be an idle block."""
        block = self._next_evicted()
        assert block is not None
        heapq.heappop(self._leaves)
        self._forget(block)
        self.num_evictions += 1

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
            is_free = not block.is_findable and not block.ref_count
            if is_free != (block.id in free):
                raise IntegrityError(f"{block} is wrongly in or not in the free list")
        idle = sum(block.is_findable and not block.ref_count for block in self._blocks)
        in_use = sum(block.ref_count > 0 for block in self._blocks)
        if idle != self._num_idle:
            raise IntegrityError(f"{idle} blocks are idle, counted {self._num_idle}")
        if len(free) + idle + in_use != len(self._blocks):
            raise IntegrityError(f"{len(free)} free + {idle} idle + {in_use} in use")

    def _check_tree(self) -> None:
        findable = [block for block in self._blocks if block.is_findable]
        children = Counter(block.parent.id for block in findable if block.parent is not None)
        registered = {block.hash: block for block in findable if block.hash is not None}
        if registered != self._by_hash:
            raise IntegrityError("the hash table does not lead to the blocks that have these hashes")
        for block in self._blocks:
            if block.num_children != children[block.id]:
                raise IntegrityError(f"{block.id} has {children[block.id]} children")
            if (newest := block.newest_child) is not None and not (newest.is_findable and newest.parent is block):
                raise IntegrityError(f"block {block.id}: {newest.id} is no child of it")
        for root, block in self._newest_of_root.items():
            if not block.is_findable or block.parent is not None or block.root != root:
                raise IntegrityError(f"block {block.id} does not begin at root {root:x}")
        for block in findable:
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
        held = {value for value, block in registered.items() if self._ends_index_block(block)}
        if held != self.index_changes.held():
            raise IntegrityError("the index changes know other hashes than the blocks")

    def _check_eviction_order(self) -> None:
        entries = set(self._leaves)
        for block in self._blocks:
            listed = (block.last_use, -block.depth, block.id) in entries
            if block.is_evictable and not listed:
                raise IntegrityError(f"block {block.id} is evictable and not in the heap")
