"""The capacity that an engine's claims are kept to, corrected by what its answers report."""

from __future__ import annotations

import pytest

from prefixcache.index.memory_index import MemoryIndex
from proxy.engines.cache_estimate import (
    ASSUMED_ENGINE_BLOCKS,
    GROWTH,
    MOST_STRIKES,
    SHRINKING,
    TOLD_CLAIMED,
    TOLD_SHRINKING,
    CacheEstimate,
)
from tests.support.chat_chains import chats
from tests.support.lru_blocks import LruBlocks
from tests.support.seeds import seeded

ENGINE_BLOCKS_A_BLOCK = 4.0
"""Index blocks of 64 tokens in an engine with blocks of 16."""


def estimate_of(told_blocks: int | None) -> CacheEstimate:
    estimate = CacheEstimate()
    estimate.capacity(told_blocks, ENGINE_BLOCKS_A_BLOCK)
    return estimate


def test_what_is_told_is_believed_but_for_what_is_never_claimed() -> None:
    estimate = CacheEstimate()
    assert estimate.capacity(1_500, 4.0) == round(375 * TOLD_CLAIMED)
    assert estimate.capacity(1_500, 1.0) == 1_500 * TOLD_CLAIMED
    assert estimate.capacity(1_500, 3.7) == round(1_500 * TOLD_CLAIMED / 3.7)
    assert estimate.capacity(3, 4.0) == 1


def test_what_is_not_told_is_ample() -> None:
    assert CacheEstimate().capacity(None, 4.0) == ASSUMED_ENGINE_BLOCKS // 4


def test_single_reports_below_change_nothing() -> None:
    """A lost race, now and then, is no small cache."""
    estimate = estimate_of(1_500)
    for _ in range(20):
        estimate.observe(is_below=True, num_claims=100)
        for _ in range(32):
            estimate.observe(is_below=False, num_claims=100)
    assert estimate.capacity(1_500, 4.0) == round(375 * TOLD_CLAIMED)


def test_repeated_ones_shrink_it_below_what_is_claimed() -> None:
    estimate = estimate_of(None)
    for number in range(MOST_STRIKES):
        assert estimate.capacity(None, 4.0) == ASSUMED_ENGINE_BLOCKS // 4
        estimate.observe(is_below=True, num_claims=1_000 + number)
    assert estimate.capacity(None, 4.0) == pytest.approx(1_002 * SHRINKING, abs=1)


def test_a_burst_that_was_on_its_way_together_shrinks_it_by_steps() -> None:
    estimate = estimate_of(4_000)
    for _ in range(2 * MOST_STRIKES):
        estimate.observe(is_below=True, num_claims=1_250)
    assert estimate.capacity(4_000, 4.0) == pytest.approx(1_000 * TOLD_CLAIMED * TOLD_SHRINKING**2, abs=1)


def test_it_grows_slowly_and_never_beyond_what_is_told() -> None:
    estimate = estimate_of(4_000)
    for _ in range(MOST_STRIKES):
        estimate.observe(is_below=True, num_claims=1_000)
    shrunk = estimate.capacity(4_000, 4.0)
    for _ in range(20):
        estimate.observe(is_below=False, num_claims=1_000)
    assert estimate.capacity(4_000, 4.0) == pytest.approx(shrunk * GROWTH**20, rel=0.01)
    for _ in range(1_000):
        estimate.observe(is_below=False, num_claims=1_000)
    assert estimate.capacity(4_000, 4.0) == 1_000 * TOLD_CLAIMED


@pytest.mark.parametrize(("told_blocks", "least"), [(4_000, 450), (None, 64)])
def test_it_never_shrinks_to_nothing(told_blocks: int | None, least: int) -> None:
    """An engine that reports nothing cached, whatever it is asked, is left some claims."""
    estimate = estimate_of(told_blocks)
    for _ in range(1_000):
        estimate.observe(is_below=True, num_claims=0)
    assert estimate.capacity(told_blocks, 4.0) == least


def test_another_capacity_begins_anew() -> None:
    estimate = estimate_of(None)
    for _ in range(MOST_STRIKES):
        estimate.observe(is_below=True, num_claims=1_000)
    assert estimate.capacity(2_000, 4.0) == 500 * TOLD_CLAIMED


async def follow(
    capacity: int, told: int | None, *, num_chats: int, num_prompts: int, answer_blocks: int = 0
) -> tuple[float, float, int | None]:
    """Share of predictions that were right, mean share of the capacity that was claimed, and the prompt with which the
    claims came down to 1.3 of it; the first two of the second half.

    The engine keeps its answers, too, of which nobody claims anything.
    """
    rand = seeded(f"a cache of {capacity}, told {told}")
    index, cache, estimate = MemoryIndex(), LruBlocks(capacity_blocks=capacity, block_tokens=1), CacheEstimate()
    family = await index.open_family("engine")
    prompts = chats(rand, num_chats=num_chats, shared_blocks=10, turn_blocks=4, num_turns=8)
    num_right, claimed, converged_at = 0, 0.0, None
    for number in range(num_prompts):
        chain = next(prompts)
        depths = (await index.match(chain)).depths
        predicted = max((depths.get(generation, 0) for generation in family.generations), default=0)
        cached = cache.cached_tokens(chain, len(chain) + 1)
        cache.hold(chain)
        cache.hold([rand.getrandbits(64) for _ in range(answer_blocks)])
        if predicted:
            estimate.observe(is_below=cached < predicted, num_claims=family.num_claims)
        answer = await index.claim("engine", family.anchor, chain, capacity=estimate.capacity(told, 1.0))
        assert answer is not None
        family = answer
        if converged_at is None and number > capacity // 4 and family.num_claims <= 1.3 * capacity:
            converged_at = number
        if number >= num_prompts // 2:
            num_right += predicted == cached
            claimed += family.num_claims / capacity
    num_judged = num_prompts - num_prompts // 2
    print(f"{num_right / num_judged:.3f} right, {claimed / num_judged:.2f} claimed, converged at {converged_at}")
    return num_right / num_judged, claimed / num_judged, converged_at


@pytest.mark.parametrize("capacity", [375, 1_000])
@pytest.mark.parametrize("answer_blocks", [0, 2])
async def test_an_unknown_capacity_is_found(capacity: int, answer_blocks: int) -> None:
    """From 262,144 blocks, to which it would take 65,536 prompts."""
    right, claimed, converged_at = await follow(
        capacity, None, num_chats=50, num_prompts=3_000, answer_blocks=answer_blocks
    )
    assert right > 0.85
    assert 0.7 < claimed < 1.6
    assert converged_at is not None and converged_at < 1_000


@pytest.mark.parametrize("capacity", [375, 1_000])
async def test_a_known_capacity_that_answers_take_their_part_of_is_corrected(capacity: int) -> None:
    right, claimed, _ = await follow(capacity, capacity, num_chats=50, num_prompts=3_000, answer_blocks=2)
    assert right > 0.85
    assert 0.7 < claimed < 1.1
