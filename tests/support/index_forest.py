"""Trees of index blocks as prompts make them, and caches that hold parts of them as real ones do.

root 0   trunk  t0 t1 t2 t3 .. t39          a chain is a piece of a trunk, then a branch:
branches             └ b0 b1 ..  └ c0 ..    t0 t1 t2 b0 b1 ..
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

NUM_ROOTS = 4
TRUNK_BLOCKS = 40
FORKS = ((0, 2), (3, 120), (17, 30), (31, 120), (32, 1), (40, 150))
"""Of every root: blocks of the trunk before a branch, blocks of the branch."""
LONG_BRANCH_BLOCKS = 700
"""Of the last branch of the last root: so long that a match takes steps of more than 32 blocks."""
AWKWARD = (0, 1, 2**64 - 1, 1 << 56, 2 << 56, (1 << 56) + 1, 0xFFFFFFFF, 0xFFFFFFFF << 32)
"""Smallest and largest, alike in all bytes but the first, and alike the marker of a long list of holders."""


def _chains() -> list[list[int]]:
    rand = random.Random("blocks")
    chains: list[list[int]] = []
    for root in range(NUM_ROOTS):
        trunk = [rand.getrandbits(64) for _ in range(TRUNK_BLOCKS)]
        if root == 0:
            trunk[: len(AWKWARD)] = AWKWARD
        for before, length in FORKS:
            is_last = root == NUM_ROOTS - 1 and before == TRUNK_BLOCKS
            branch = [rand.getrandbits(64) for _ in range(LONG_BRANCH_BLOCKS if is_last else length)]
            chains.append(trunk[:before] + branch)
    return chains


CHAINS = _chains()
DEPTHS = {block: depth for chain in CHAINS for depth, block in enumerate(chain)}
_CHILDREN: dict[int, set[int]] = {}
for _chain in CHAINS:
    for _parent, _child in pairwise(_chain):
        _CHILDREN.setdefault(_parent, set()).add(_child)


@dataclass(slots=True)
class Cache:
    """Prefix-closed at every moment: a parent is stored before its children and removed after them."""

    held: set[int] = field(default_factory=set)
    unsent: list[tuple[int, bool]] = field(default_factory=list)
    """Blocks stored (True) and removed since the last batch, in their order."""
    claimed: set[int] = field(default_factory=set)
    """What the batches said so far."""

    def store(self, chain: list[int]) -> None:
        for block in chain:
            if block not in self.held:
                self.held.add(block)
                self.unsent.append((block, True))

    def evict(self, block: int) -> None:
        """With everything below it, leaves first."""
        gone: list[int] = []
        found = [block]
        while found:
            block = found.pop()
            if block in self.held:
                gone.append(block)
                found += _CHILDREN.get(block, ())
        for block in sorted(gone, key=lambda block: -DEPTHS[block]):
            self.held.discard(block)
            self.unsent.append((block, False))

    def next_batch(self, most: int) -> tuple[list[int], list[int]]:
        """Net changes of the next `most` steps, stored and removed: what a publisher sends that is cut off there."""
        some, self.unsent = self.unsent[:most], self.unsent[most:]
        net = dict(some)
        stored = [block for block, is_held in net.items() if is_held]
        removed = [block for block, is_held in net.items() if not is_held]
        self.claimed = (self.claimed | set(stored)) - set(removed)
        return stored, removed
