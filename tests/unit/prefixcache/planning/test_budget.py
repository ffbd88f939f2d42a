"""How many blocks an amount of KV memory comes to."""

from __future__ import annotations

import pytest

from prefixcache.errors import ConfigError
from prefixcache.memory import MemoryAmount, MemoryShare
from prefixcache.planning.budget import Budget

BLOCK = 10
HALF = MemoryShare(percent=50.0)


def budget(*, weights: int | None = 300, memory: int | None = None, workers: int = 1) -> Budget:
    return Budget(weights_bytes=weights, memory_bytes=memory, num_workers=workers, bytes_per_block=BLOCK)


def available() -> int:
    return 1_100


@pytest.mark.parametrize(
    ("given", "amount", "num_blocks"),
    [
        (budget(), 219, 21),
        (budget(weights=None), 219, 21),
        (budget(workers=4), 219, 21),
        (budget(), HALF, 40),
        (budget(workers=4), HALF, 10),
        (budget(memory=2_300), HALF, 100),
        (budget(memory=2_300, workers=4), HALF, 100),
        (budget(memory=2_000), None, 150),
    ],
)
def test_blocks_that_fit(given: Budget, amount: MemoryAmount | None, num_blocks: int) -> None:
    assert given.num_blocks(amount, available) == num_blocks


@pytest.mark.parametrize(
    ("given", "amount", "message"),
    [
        (budget(), 9, r"9 bytes are left for the KV cache, less than one block of 10 bytes"),
        (budget(weights=2_000), HALF, r"0 bytes are left"),
        (budget(memory=300), None, r"0 bytes are left"),
        (budget(weights=None), HALF, r"what the weights leave is not known without them: give --kv-memory as a size"),
        (budget(weights=None, memory=2_000), None, r"what the weights leave is not known"),
    ],
)
def test_what_leaves_no_block_is_refused(given: Budget, amount: MemoryAmount | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given.num_blocks(amount, available)


def test_more_than_the_memory_is_refused() -> None:
    assert budget(memory=500).checked(20) == 20
    with pytest.raises(
        ConfigError, match=r"KV cache of 210 B does not fit into --memory 500 B: weights of 300 B leave 200 B"
    ):
        budget(memory=500).checked(21)
    assert budget(memory=500, weights=None).checked(50) == 50
    assert budget().checked(10**9) == 10**9
