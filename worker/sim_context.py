"""What the simulated engine draws from: a sequence as its blocks hold it.

    step        prefill   decode  decode  ...  decode   decode
    position    .. 13999   14000   14001        14015    14016
    read        whole      the token            whole, for a block begins: 16 tokens

To read 14,000 tokens from 875 blocks for every token drawn would cost more than all else that a decode does, nearly all
of it for memory that no cache holds any more. In between, the one block that is written may not have changed hands, as
the write of each token checks; one that was begun by a copy has.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import xxhash

from prefixcache.types import TOKEN_BYTES, pack_tokens, unpack_tokens
from worker.runner import StepShare
from worker.sim_kv import SimKV

Place = tuple[int, int]
"""The block that holds a sequence's last token, and how many tokens there are: no two sequences have the same within a
block, for a block that is not full has one owner."""


class SimContext:
    """One sequence after its last token."""

    __slots__ = ("_hash", "output")

    def __init__(self, packed: bytes, num_output_tokens: int) -> None:
        self._hash = xxhash.xxh3_64(packed)
        self.output = unpack_tokens(packed[len(packed) - TOKEN_BYTES * num_output_tokens :])

    @property
    def digest(self) -> bytes:
        """Of all tokens, packed."""
        return self._hash.digest()

    def append(self, token_ids: Sequence[int]) -> None:
        self._hash.update(pack_tokens(token_ids))
        self.output.extend(array("I", token_ids))


class SimContexts:
    """The sequences of the last step, as far as they were read."""

    def __init__(self, kv: SimKV, *, block_size: int) -> None:
        self._kv = kv
        self._block_size = block_size
        self._last: Mapping[Place, SimContext | None] = {}
        self._next: dict[Place, SimContext | None] = {}

    def step(self, shares: Sequence[StepShare]) -> bool:
        """A step begins; whether it goes on with a sequence of the last one."""
        self._last, self._next = self._next, {}
        for share in shares:
            self._next[self._place(share, share.start + len(share.token_ids))] = None
        return any(share.start > 0 and self._place(share, share.start) in self._last for share in shares)

    def after(self, share: StepShare, num_output_tokens: int) -> SimContext:
        """The sequence after a share that is written. Raises WorkerFault for what its blocks do not hold."""
        goes_on = share.start % self._block_size and share.copied_block is None
        context = self._last.get(self._place(share, share.start)) if goes_on else None
        if context is not None and len(context.output) + len(share.token_ids) == num_output_tokens:
            context.append(share.token_ids)
        else:
            context = SimContext(self._kv.read(share), num_output_tokens)
        self._next[self._place(share, share.start + len(share.token_ids))] = context
        return context

    def _place(self, share: StepShare, num_tokens: int) -> Place:
        return share.block_table[(num_tokens - 1) // self._block_size], num_tokens
