"""The tree shapes hold what their table says, and how the figures of repeats are drawn together."""

from __future__ import annotations

from random import Random

import pytest

from tests.bench.index.bench import percentile, spread
from tests.bench.index.tree_shapes import TREE_SHAPES, distinct_blocks


@pytest.mark.parametrize(
    ("name", "num_chains", "longest", "num_blocks"),
    [
        ("deep chats", 10, 1_000, 10_000),
        ("chats behind one system prompt", 2_000, 28, 24 + 2_000 * 4),
        ("unrelated short prompts", 10_000, 1, 10_000),
        ("agent forks", 2 * 41, 299, 2 * (200 + 40 * 100)),
    ],
)
def test_a_tenth_of_a_shape(name: str, num_chains: int, longest: int, num_blocks: int) -> None:
    chains = list(TREE_SHAPES[name](Random(1), 0.1))
    assert len(chains) == num_chains
    assert max(map(len, chains)) <= longest
    blocks = distinct_blocks(iter(chains))
    assert len(blocks) == len(set(blocks)) == num_blocks


def test_chats_share_their_system_prompt_and_forks_their_task() -> None:
    chats = list(TREE_SHAPES["chats behind one system prompt"](Random(1), 0.001))
    assert {tuple(chat[:24]) for chat in chats} == {tuple(chats[0][:24])}
    task, *forks = list(TREE_SHAPES["agent forks"](Random(1), 0.01))
    for fork in forks:
        shared = len(fork) - 100
        assert fork[:shared] == task[:shared]
        assert not set(fork[shared:]) & set(task)


def test_parents_come_before_children() -> None:
    chains = list(TREE_SHAPES["agent forks"](Random(1), 0.01))
    place = {block: at for at, block in enumerate(distinct_blocks(iter(chains)))}
    for chain in chains:
        assert [place[block] for block in chain] == sorted(place[block] for block in chain)


def test_spread_and_percentile() -> None:
    assert spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    hundred = [float(value) for value in range(100, 0, -1)]
    assert (percentile(hundred, 0.5), percentile(hundred, 0.99), percentile([7.0], 0.99)) == (51.0, 100.0, 7.0)
