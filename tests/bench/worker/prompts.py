"""Prompts of random tokens: what a step costs does not depend on what they say, and none shares a block by chance."""

from __future__ import annotations

from random import Random

LEAST_TOKEN = 100
"""Special tokens stand below it."""
TOKENS = 150
"""Few enough for the vocabulary of the simulated model, which is bytes."""


def new_prompt(random: Random, num_tokens: int) -> list[int]:
    """Shares no block with another one."""
    return [random.randrange(LEAST_TOKEN, LEAST_TOKEN + TOKENS) for _ in range(num_tokens)]
