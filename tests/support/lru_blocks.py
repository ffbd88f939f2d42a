"""The prefix cache of an engine: the blocks it holds, least recently used and deepest first out.

prompt    | block 0 | block 1 | block 2 | rest |      each block is named by its tokens and the block before it
reused    |  held   |  held   |  never: at least one token is computed, so not the block that ends the prompt
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence


def block_chain(ids: Sequence[int], block_tokens: int, *, salt: bytes = b"") -> list[int]:
    """Names of the full blocks of `ids`; prompts with different salts share none."""
    digest = hashlib.sha256(salt).digest() if salt else b""
    layout = struct.Struct(f"<{block_tokens}I")
    names: list[int] = []
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        digest = hashlib.sha256(digest + layout.pack(*ids[start : start + block_tokens])).digest()
        names.append(int.from_bytes(digest[:8], "big"))
    return names


class LruBlocks:
    """At most `capacity_blocks` blocks; None is no limit."""

    def __init__(self, *, capacity_blocks: int | None, block_tokens: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._block_tokens = block_tokens
        self._held: OrderedDict[int, None] = OrderedDict()
        """The next to be evicted comes first."""

    def __len__(self) -> int:
        return len(self._held)

    def cached_tokens(self, chain: Sequence[int], num_tokens: int) -> int:
        """Tokens of a prompt with this chain that are there and may be reused."""
        num_blocks = 0
        for name in chain[: (num_tokens - 1) // self._block_tokens]:
            if name not in self._held:
                break
            num_blocks += 1
        return num_blocks * self._block_tokens

    def hold(self, chain: Sequence[int]) -> None:
        """Makes the blocks of `chain` the most recent ones, the first of them the very last to go."""
        for name in reversed(chain):
            self._held[name] = None
            self._held.move_to_end(name)
        while self._capacity_blocks is not None and len(self._held) > self._capacity_blocks:
            self._held.popitem(last=False)

    def clear(self) -> None:
        self._held.clear()
