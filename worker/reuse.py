"""What a sequence finds of its next tokens in the pool.

tokens   [ block | block | block | bl. ]
table      held
blocks             found   found
copied                             2 tokens of another block begin alike
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.block_pool import BlockPool
from worker.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Reusable:
    """Nothing of it is held yet."""

    blocks: list[int]
    """They continue the table."""
    copied: tuple[int, int] | None
    """The block whose beginning is that of the next one, and how many tokens of it."""

    @property
    def num_copied_tokens(self) -> int:
        return 0 if self.copied is None else self.copied[1]


def find_blocks(pool: BlockPool, sequence: Sequence) -> list[int]:
    """Findable blocks that continue its table."""
    table, found = sequence.block_table, list[int]()
    parent_id = table[-1] if table else None
    for position in range(len(table), sequence.num_reusable_blocks):
        parent_id = pool.find(
            parent_id,
            value=sequence.block_hash(position),
            token_ids=sequence.block_content(position),
            root=sequence.root,
        )
        if parent_id is None:
            break
        found.append(parent_id)
    return found


def find_reusable(pool: BlockPool, sequence: Sequence) -> Reusable:
    """All that may be reused by one that has no blocks; its last token is always computed."""
    blocks = find_blocks(pool, sequence)
    copied = pool.find_beginning(
        blocks[-1] if blocks else None,
        token_ids=sequence.content_after(len(blocks), sequence.num_tokens - 1),
        root=sequence.root,
    )
    return Reusable(blocks=blocks, copied=copied)
