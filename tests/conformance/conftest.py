"""The product for the official clients: Valkey, a real worker over a scripted runner, a proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest_asyncio

from tests.cases.world import World, open_world
from tests.support.tiny_tokenizer import TINY_EOS_ID
from tests.support.valkey import Server, valkey, valkey_process

__all__ = ["fast_world", "valkey", "valkey_process", "world"]

MOST_TOKENS = 40


def ends_by_itself(prompt: Sequence[int], index: int) -> int | None:
    """The stop token after 4 to 39 tokens, the number depending on the prompt alone."""
    return TINY_EOS_ID if index == 4 + sum(prompt) % (MOST_TOKENS - 4) else None


@pytest_asyncio.fixture
async def world(valkey: Server) -> AsyncIterator[World]:
    """Each step takes a while, so that a client can leave in the middle."""
    async with open_world(valkey, script=ends_by_itself, max_model_len=512, step_delay_s=0.001) as opened:
        yield opened


@pytest_asyncio.fixture
async def fast_world(valkey: Server) -> AsyncIterator[World]:
    async with open_world(valkey, script=ends_by_itself, max_model_len=512) as opened:
        yield opened
