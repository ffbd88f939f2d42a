"""Reading sequences back: the same as reading them whole, and a block that changed hands is found out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import xxhash

from prefixcache.errors import WorkerFault
from prefixcache.types import pack_tokens
from tests.support.seeds import seeded
from worker.runner import StepShare
from worker.sim_context import SimContext, SimContexts
from worker.sim_kv import SimKV

BLOCK = 4


class World:
    """A cache, and sequences that a step takes further."""

    def __init__(self) -> None:
        self.kv = SimKV(num_blocks=64, block_size=BLOCK)
        self.contexts = SimContexts(self.kv, block_size=BLOCK)

    def step(self, *shares: tuple[Sequence[int], int, Sequence[int], int]) -> tuple[bool, list[SimContext]]:
        """Shares as (all tokens, start, blocks, output tokens)."""
        made = [StepShare(token_ids=[*tokens[start:]], start=start, block_table=table, sample=None)
                for tokens, start, table, _ in shares]  # fmt: skip
        goes_on = self.contexts.step(made)
        for share in made:
            self.kv.write(share)
        read = [self.contexts.after(share, num) for share, (*_, num) in zip(made, shares, strict=True)]
        return goes_on, read


def _digest(tokens: Sequence[int]) -> bytes:
    return xxhash.xxh3_64_digest(pack_tokens(tokens))


def test_token_by_token_is_as_read_whole() -> None:
    random = seeded("sim context")
    world, blocks = World(), random.sample(range(64), 60)
    # All begin with the same tokens in the same first block; each goes on in blocks of its own.
    tables = [[blocks[0], *blocks[1 + 19 * n : 20 + 19 * n]] for n in range(3)]
    sequences = [[random.randrange(99) for _ in range(BLOCK)] for _ in tables]
    sequences = [[*sequences[0], random.randrange(99)] for _ in tables]
    starts = [0, BLOCK, BLOCK]
    for drawn in range(40):
        _, contexts = world.step(*zip(sequences, starts, tables, [drawn] * 3, strict=True))
        for tokens, context in zip(sequences, contexts, strict=True):
            assert context.digest == _digest(tokens)
            assert context.output.tolist() == tokens[len(tokens) - drawn :]
        starts = [len(tokens) for tokens in sequences]
        for tokens in sequences:
            tokens.append(random.randrange(99))


def test_a_block_that_changed_hands_is_found_when_the_next_one_begins() -> None:
    world, tokens = World(), [*range(2 * BLOCK + 1)]
    world.step((tokens, 0, [5, 6, 7, 8], 0))
    world.step(([50, 51], 0, [6], 0))  # another sequence takes the second block
    with pytest.raises(WorkerFault, match="hold content of places"):
        for _ in range(BLOCK):
            tokens.append(9)
            world.step((tokens, len(tokens) - 1, [5, 6, 7, 8], len(tokens) - 2 * BLOCK - 1))


def test_a_sequence_begun_by_a_copy_is_read_whole() -> None:
    """Though one that ended in the last step had as many tokens in the very block that it got."""
    world = World()
    world.step(([1, 2, 3, 4, 5], 0, [0, 1], 0), ([6, 7, 8, 9, 5], 0, [2, 3], 0))
    shares = [StepShare(token_ids=[10], start=5, block_table=[2, 1], sample=None, copied_block=3)]
    world.contexts.step(shares)
    world.kv.write(shares[0])
    assert world.contexts.after(shares[0], 1).digest == _digest([6, 7, 8, 9, 5, 10])


def test_a_step_goes_on_where_one_of_its_sequences_does() -> None:
    world, tokens = World(), [*range(BLOCK)]
    assert world.step((tokens, 0, [1, 2], 0))[0] is False
    assert world.step(([7], 0, [3], 0), ([*tokens, 8], BLOCK, [1, 2], 1))[0] is True
    assert world.step(([*tokens, 8, 9], BLOCK + 1, [1, 2], 2))[0] is True
    assert world.step(([7], 0, [3], 0))[0] is False
    assert world.step(([*tokens, 8, 9, 9], BLOCK + 2, [1, 2], 3))[0] is False, "it sat a step out"
