"""The cache that tests take for an engine's: against a cache that is searched from end to end."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.lru_blocks import LruBlocks, block_chain
from tests.support.seeds import seeded

BLOCK_TOKENS = 4


class ListedBlocks:
    """The dumb truth: a list of names, the next one to be evicted first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self.names: list[int] = []

    def hold(self, chain: Sequence[int]) -> None:
        self.names = [name for name in self.names if name not in chain] + [*chain][::-1]
        self.names = self.names[-self._capacity_blocks :]

    def cached_tokens(self, chain: Sequence[int], num_tokens: int) -> int:
        held = [name in self.names for name in chain] + [False]
        return min(held.index(False), (num_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS


def test_a_chain_names_full_blocks_by_all_that_stands_before() -> None:
    ids = list(range(11))
    chain = block_chain(ids, BLOCK_TOKENS)
    assert len(chain) == 2
    assert block_chain(ids[:8], BLOCK_TOKENS) == chain
    assert block_chain([*ids[:4], 99, *ids[5:]], BLOCK_TOKENS)[0] == chain[0]
    assert block_chain([99, *ids[1:]], BLOCK_TOKENS)[1] != chain[1]
    assert not set(chain) & set(block_chain(ids, BLOCK_TOKENS, salt=b"other"))


def test_the_block_that_ends_a_prompt_is_never_reused() -> None:
    blocks = LruBlocks(capacity_blocks=None, block_tokens=BLOCK_TOKENS)
    chain = block_chain(range(8), BLOCK_TOKENS)
    assert blocks.cached_tokens(chain, 8) == 0
    blocks.hold(chain)
    assert blocks.cached_tokens(chain, 8) == 4
    assert blocks.cached_tokens(chain, 9) == 8


def test_the_deepest_block_of_the_chain_used_least_recently_goes_first() -> None:
    blocks = LruBlocks(capacity_blocks=5, block_tokens=BLOCK_TOKENS)
    older, newer = block_chain(range(8), BLOCK_TOKENS), block_chain(range(100, 116), BLOCK_TOKENS)
    blocks.hold(older)
    blocks.hold(newer[:3])
    blocks.hold(newer)
    assert len(blocks) == 5
    assert blocks.cached_tokens(older, 9) == 4
    assert blocks.cached_tokens(newer, 17) == 16
    blocks.clear()
    assert blocks.cached_tokens(newer, 17) == 0


def test_it_holds_what_the_dumb_truth_holds() -> None:
    random = seeded("blocks")
    prompts = [[random.randrange(2) for _ in range(random.randrange(1, 40))] for _ in range(60)]
    blocks, truth = LruBlocks(capacity_blocks=24, block_tokens=BLOCK_TOKENS), ListedBlocks(24)
    for _ in range(600):
        ids = random.choice(prompts)
        chain = block_chain(ids, BLOCK_TOKENS)
        assert blocks.cached_tokens(chain, len(ids)) == truth.cached_tokens(chain, len(ids))
        blocks.hold(chain)
        truth.hold(chain)
        assert len(blocks) == len(truth.names)
