"""The simulated engine's KV cache: of each token it keeps the id and the position, block by block."""

from __future__ import annotations

from prefixcache.errors import WorkerFault
from prefixcache.types import TOKEN_BYTES, pack_tokens
from worker.runner import StepShare


class SimKV:
    """What was computed where. A sequence is known only by reading it back through its block table, so reuse of a wrong
    or stale block shows: in other tokens, or as a WorkerFault where positions do not fit together.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._width = TOKEN_BYTES * block_size
        self._block_size = block_size
        self._contents = [b""] * num_blocks
        """Packed ids of each block's leading slots, as many as are written."""
        self._places: list[int | None] = [None] * num_blocks
        """Where each block stands in its sequence: 0 for the block of positions 0 .. block_size - 1."""
        self._order = list(range(num_blocks))
        """All places. Those in use are its very objects: equal ones are identical, which compares faster than equal."""

    def write(self, share: StepShare) -> None:
        """Puts a share's tokens behind those before it. Raises WorkerFault if those are not there."""
        data = pack_tokens(share.token_ids)
        place, slot = divmod(share.start, self._block_size)
        if share.copied_block is not None:
            target = share.block_table[place]
            self._contents[target] = self._contents[share.copied_block][: TOKEN_BYTES * slot]
            self._places[target] = self._places[share.copied_block]
        taken = 0
        while taken < len(data):
            block = share.block_table[place]
            before = b""
            if slot:
                before = self._contents[block][: TOKEN_BYTES * slot]
                if self._places[block] != place or len(before) < TOKEN_BYTES * slot:
                    raise WorkerFault(f"block {block} lacks the tokens before slot {slot} of its place {place}")
            piece = data[taken : taken + self._width - len(before)]
            self._contents[block], self._places[block] = before + piece, self._order[place]
            taken += len(piece)
            place, slot = place + 1, 0

    def read(self, share: StepShare) -> bytes:
        """Packed ids of the whole sequence up to the share's last token. Raises WorkerFault for what is not there."""
        num_tokens = share.start + len(share.token_ids)
        table = share.block_table[: -(-num_tokens // self._block_size)]
        # Every token drawn reads its whole context, so these lines are most of what it costs.
        places = list(map(self._places.__getitem__, table))
        if places != self._order[: len(table)]:
            raise WorkerFault(f"blocks {list(table)} hold content of places {places}")
        context = b"".join(map(self._contents.__getitem__, table))
        if len(context) != TOKEN_BYTES * num_tokens:
            raise WorkerFault(f"blocks {list(table)} hold {len(context) // TOKEN_BYTES} tokens, not {num_tokens}")
        return context

    def spoil(self, share: StepShare) -> None:
        """Forgets the blocks that a share was to write: it failed."""
        end = share.start + len(share.token_ids)
        for place in range(share.start // self._block_size, -(-end // self._block_size)):
            self._places[share.block_table[place]] = None
