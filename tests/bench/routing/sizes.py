"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Chats that share few system prompts, interleaved by clients which each have one request at a time."""

    num_chats: int
    num_turns: int
    num_systems: int
    system_words: int
    user_words: int
    answer_tokens: int
    num_clients: int
    model: str = "lru"
    """What the engines serve it as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    workload: Workload
    seeds: tuple[int, ...]
    num_engines: int
    ample_blocks: int
    """Of each engine, where all chats fit."""
    tight_blocks: int
    """Of each engine, where they do not."""
    tokenized_turns: int
    """Turns of the chat that is tokenized."""
    decision_repeats: int
    """Batches of decisions, for each policy and number of workers."""


FULL = Sizes(
    workload=Workload(
        num_chats=50,
        num_turns=8,
        num_systems=5,
        system_words=350,
        user_words=40,
        answer_tokens=24,
        num_clients=8,
    ),
    seeds=(1, 2, 3, 4, 5),
    num_engines=4,
    ample_blocks=1500,
    tight_blocks=500,
    tokenized_turns=50,
    decision_repeats=200,
)

QUICK = Sizes(
    workload=Workload(
        num_chats=10,
        num_turns=3,
        num_systems=2,
        system_words=60,
        user_words=10,
        answer_tokens=8,
        num_clients=4,
    ),
    seeds=(1,),
    num_engines=2,
    ample_blocks=1500,
    tight_blocks=60,
    tokenized_turns=8,
    decision_repeats=3,
)
"""On the byte tokenizer: some five tokens a word."""

QUICK_ENGINES = ("--prefill-us=20", "--concurrent-prefill")
"""Flags of engines that are not what a client waits for: routing by prefix alone is seen, and little of the queues."""

REAL_ENGINES = Workload(
    num_chats=9,
    num_turns=5,
    num_systems=3,
    system_words=350,
    user_words=40,
    answer_tokens=8,
    num_clients=3,
)
"""Half a minute for two engines of one core each; an odd number of chats, so that no alternation keeps them apart."""
