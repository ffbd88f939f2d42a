"""Four shapes of prefix trees, as the chains of index blocks that a fleet would store.

deep chats         100 chats of 1,000 index blocks each: 64,000 tokens
system prompt      20,000 chats of 4 index blocks behind one system prompt of 24
unrelated prompts  100,000 prompts of 1 index block
agent forks        25 tasks of 200 index blocks, each forked 40 times at any depth, 100 blocks a fork
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from random import Random

HASH_BYTES = 8
DEEP_CHATS, DEEP_CHAT_BLOCKS = 100, 1_000
SHARING_CHATS, SYSTEM_PROMPT_BLOCKS, SHARING_CHAT_BLOCKS = 20_000, 24, 4
UNRELATED_PROMPTS, UNRELATED_PROMPT_BLOCKS = 100_000, 1
TASKS, TASK_BLOCKS, FORKS_PER_TASK, FORK_BLOCKS = 25, 200, 40, 100


def new_hashes(random: Random, count: int) -> array[int]:
    """Block hashes not seen before: a chained hash says nothing of its parent, so any 64 bits will do."""
    return array("Q", random.randbytes(HASH_BYTES * count))


def deep_chats(random: Random, scale: float) -> Iterator[array[int]]:
    for _ in range(_scaled(DEEP_CHATS, scale)):
        yield new_hashes(random, DEEP_CHAT_BLOCKS)


def chats_behind_one_system_prompt(random: Random, scale: float) -> Iterator[array[int]]:
    system_prompt = new_hashes(random, SYSTEM_PROMPT_BLOCKS)
    for _ in range(_scaled(SHARING_CHATS, scale)):
        yield system_prompt + new_hashes(random, SHARING_CHAT_BLOCKS)


def unrelated_prompts(random: Random, scale: float) -> Iterator[array[int]]:
    for _ in range(_scaled(UNRELATED_PROMPTS, scale)):
        yield new_hashes(random, UNRELATED_PROMPT_BLOCKS)


def agent_forks(random: Random, scale: float) -> Iterator[array[int]]:
    for _ in range(_scaled(TASKS, scale)):
        task = new_hashes(random, TASK_BLOCKS)
        yield task
        for _ in range(FORKS_PER_TASK):
            yield task[: random.randrange(1, TASK_BLOCKS)] + new_hashes(random, FORK_BLOCKS)


TREE_SHAPES: Mapping[str, Callable[[Random, float], Iterator[array[int]]]] = {
    "deep chats": deep_chats,
    "chats behind one system prompt": chats_behind_one_system_prompt,
    "unrelated short prompts": unrelated_prompts,
    "agent forks": agent_forks,
}


def distinct_blocks(chains: Iterator[array[int]]) -> array[int]:
    """Each index block once, parents first."""
    return array("Q", dict.fromkeys(block for chain in chains for block in chain))


def _scaled(count: int, scale: float) -> int:
    return max(round(count * scale), 1)
