"""Chains of index blocks as chats make them that share a system prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator


def chats(
    rand: random.Random, *, num_chats: int, shared_blocks: int, turn_blocks: int, num_turns: int
) -> Iterator[list[int]]:
    """Prompts of chats that go on at random; one that had its turns is followed by a new one."""
    shared = [rand.getrandbits(64) for _ in range(shared_blocks)]
    open_chats: list[list[int]] = [[] for _ in range(num_chats)]
    while True:
        chat = rand.choice(open_chats)
        if len(chat) == turn_blocks * num_turns:
            chat.clear()
        chat += [rand.getrandbits(64) for _ in range(turn_blocks)]
        yield shared + chat
