"""What one engine is claimed to hold, over an index whose faults are scripted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prefixcache.limits import FAMILY_SETTLED_S, MAX_APPLY_HASHES, MAX_QUEUED_CLAIMS
from proxy.engines.cache_estimate import MOST_STRIKES
from proxy.engines.counted_hits import WINDOW_TOKENS
from proxy.engines.engine_claims import NO_INCARNATION, EngineClaims
from proxy.warnings_log import QuietLog
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import FaultyIndex
from tests.support.waiting import eventually

ENGINE = "e1:8000"
CHAIN = list(range(1, 11))


class Claiming:
    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.index = FaultyIndex()
        self.claims = EngineClaims(self.index, ENGINE, QuietLog(logging.getLogger(__name__)), clock=self.clock)
        self.num_needs = 0
        self.claims.on_need = self.note_need

    def note_need(self) -> None:
        self.num_needs += 1

    async def open(self) -> None:
        self.claims.take(await self.index.open_family(ENGINE, instead_of=self.claims.replaced))

    def claim(self, chain: list[int], capacity_blocks: int | None = 1_600) -> None:
        """Into a cache of 400 index blocks, if nothing else is said."""
        self.claims.claim(chain, capacity_blocks=capacity_blocks, engine_blocks_per_index_block=4.0)

    async def depth(self, chain: list[int]) -> int:
        depths = (await self.index.match(chain)).depths
        return max((depths.get(generation, 0) for generation in self.claims.generations), default=0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        writer = asyncio.create_task(self.claims.run())
        try:
            yield
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self.index.check_integrity()


async def test_without_a_family_nothing_is_known() -> None:
    claiming = Claiming()
    assert (claiming.claims.anchor, claiming.claims.generations) == (NO_INCARNATION, ())
    assert claiming.claims.is_reannouncing
    await claiming.open()
    assert claiming.claims.anchor in claiming.index._lease_ends
    assert not claiming.claims.is_reannouncing


async def test_what_is_claimed_is_found() -> None:
    claiming = Claiming()
    await claiming.open()
    async with claiming.running():
        claiming.claim(CHAIN)
        assert claiming.claims.num_claims == 0, "nothing is waited for"
        await eventually(lambda: claiming.claims.num_claims == 10)
        assert await claiming.depth(CHAIN) == 10
        claiming.claim([])
        claiming.claim([*CHAIN[:3], 99])
        await eventually(lambda: claiming.claims.num_claims == 11)


async def test_claims_wait_for_the_first_family() -> None:
    """A proxy that begins while the index is away."""
    claiming = Claiming()
    async with claiming.running():
        claiming.claim(CHAIN)
        await asyncio.sleep(0.01)
        assert claiming.index.faults.num_calls == 0
        await claiming.open()
        await eventually(lambda: claiming.claims.num_claims == 10)


@pytest.mark.parametrize("num_blocks", [256, 257, 700])
async def test_of_a_long_chain_the_deep_end_is_the_oldest(num_blocks: int) -> None:
    """So that a block never outlives its parent."""
    claiming, chain = Claiming(), list(range(num_blocks))
    await claiming.open()
    async with claiming.running():
        claiming.claim(chain, capacity_blocks=4 * 1_000)
        await eventually(lambda: claiming.claims.num_claims == num_blocks)
        assert claiming.index.faults.num_calls == 1 + -(-num_blocks // MAX_APPLY_HASHES)
        incarnations = [next(iter(claiming.index._holders[block])) for block in chain]
        assert incarnations == sorted(incarnations, reverse=True)


async def test_capacity_is_told_in_blocks_of_the_engine() -> None:
    """1,600 of 16 tokens are 400 index blocks of 64: a generation is 100 of them."""
    claiming = Claiming()
    await claiming.open()
    async with claiming.running():
        for number in range(40):
            claiming.claim([number * 100 + block for block in range(50)])
        await eventually(lambda: claiming.index.faults.num_calls == 41)
        await eventually(lambda: 400 <= claiming.claims.num_claims < 500)
        assert len(claiming.claims.generations) <= 6


async def test_too_many_claims_at_once_lose_the_oldest() -> None:
    claiming = Claiming()
    await claiming.open()
    for number in range(MAX_QUEUED_CLAIMS + 3):
        claiming.claim([number])
    assert claiming.claims.is_reannouncing
    async with claiming.running():
        await eventually(lambda: claiming.claims.num_claims == MAX_QUEUED_CLAIMS)
        assert [await claiming.depth([number]) for number in range(5)] == [0, 0, 0, 1, 1]


async def test_lost_claims_are_made_up_for_by_a_cache_full_of_new_ones() -> None:
    """As long as that takes this proxy's own placements speak for the engine, too."""
    claiming = Claiming()
    await claiming.open()
    async with claiming.running():
        claiming.claim(CHAIN)
        await eventually(lambda: claiming.claims.num_claims == 10)
        claiming.index.faults.fail_next(1)
        claiming.claim([77])
        await eventually(lambda: claiming.claims.is_reannouncing)
        assert await claiming.depth([77]) == 0
        for number in range(1, 8):
            assert claiming.claims.is_reannouncing == (number <= 5)
            claiming.claim([number * 1_000 + block for block in range(100)])
            await eventually(lambda: not claiming.claims._queue)
            await asyncio.sleep(0.01)
        assert await claiming.depth(CHAIN) == 0


async def test_a_store_that_was_emptied_leaves_it_without_its_claims() -> None:
    claiming = Claiming()
    await claiming.open()
    async with claiming.running():
        claiming.index.flush()
        claiming.claim(CHAIN)
        await eventually(lambda: claiming.num_needs == 1)
        claiming.claims.take(None)
        assert claiming.claims.anchor == NO_INCARNATION
        await claiming.open()
        assert claiming.claims.is_reannouncing
        claiming.claim(CHAIN)
        await eventually(lambda: claiming.claims.num_claims == 10)


# --- an engine that lost its cache


async def test_a_cache_that_is_gone_leaves_no_claims() -> None:
    claiming = Claiming()
    await claiming.open()
    before = claiming.claims.anchor
    async with claiming.running():
        claiming.claim(CHAIN)
        await eventually(lambda: claiming.claims.num_claims == 10)
        claiming.claim([77])
        claiming.claims.begin_anew()
        assert (claiming.claims.anchor, claiming.num_needs) == (NO_INCARNATION, 1)
        await claiming.open()
        assert claiming.claims.anchor > before
        assert not claiming.claims.is_reannouncing, "what was placed before is gone, too"
        await asyncio.sleep(0.01)
        assert claiming.index.faults.num_calls == 3, "the one that was waiting is not written"
        assert (await claiming.index.match(CHAIN)).depths == (await claiming.index.match([77])).depths == {}


async def test_what_another_proxy_has_just_begun_is_not_begun_again() -> None:
    claiming = Claiming()
    await claiming.open()
    other = await claiming.index.open_family(ENGINE, instead_of=claiming.claims.anchor)
    claiming.claims.take(other)
    claiming.clock.now += FAMILY_SETTLED_S - 0.1
    claiming.claims.begin_anew()
    assert (claiming.claims.anchor, claiming.num_needs) == (other.anchor, 0)
    claiming.clock.now += 0.2
    claiming.claims.begin_anew()
    assert (claiming.claims.anchor, claiming.num_needs) == (NO_INCARNATION, 1)


async def test_claims_that_were_made_for_a_family_stay_with_it() -> None:
    """A prompt of before is not claimed of the engine that began anew."""
    claiming = Claiming()
    await claiming.open()
    claiming.claim(CHAIN)
    claiming.claims.take(await claiming.index.open_family(ENGINE, instead_of=claiming.claims.anchor))
    async with claiming.running():
        await eventually(lambda: claiming.num_needs == 1)
        assert (await claiming.index.match(CHAIN)).depths == {}


# --- reports


def held_of(claiming: Claiming) -> int:
    """Index blocks that the next claim would keep."""
    claiming.claim([1])
    return claiming.claims._queue[-1].capacity


@pytest.mark.parametrize(
    ("predicted_tokens", "cached_tokens", "is_below"),
    [
        (640, 640, False),
        (640, 6_400, False),
        (640, 577, False),
        (640, 560, True),
        (64, 0, True),
        (6_400, 5_700, False),
        (6_400, 5_600, True),
        (640, None, False),
        (0, 0, False),
    ],
)
async def test_reports_below_the_prediction_shrink_what_is_kept(
    predicted_tokens: int, cached_tokens: int | None, is_below: bool
) -> None:
    """By an index block at least, and an eighth, which an estimate of tokens by bytes may be off; null is not zero."""
    claiming = Claiming()
    await claiming.open()
    before = held_of(claiming)
    for _ in range(MOST_STRIKES):
        claiming.claims.observe(predicted_tokens=predicted_tokens, cached_tokens=cached_tokens, index_block_tokens=64.0)
    assert (held_of(claiming) < before) == is_below


async def test_where_answers_tell_nothing_the_engines_own_count_does() -> None:
    claiming = Claiming()
    await claiming.open()
    counted = 0.0
    for share in (1.0, 0.9, 0.5):
        before = held_of(claiming)
        for _ in range(3 * MOST_STRIKES):
            claiming.claims.note_hits(counted)
            for _ in range(WINDOW_TOKENS // 1_024):
                claiming.claims.observe(predicted_tokens=1_024, cached_tokens=None, index_block_tokens=64.0)
            counted += share * WINDOW_TOKENS
        claiming.claims.note_hits(counted)
        assert (held_of(claiming) < before) == (share == 0.5)
