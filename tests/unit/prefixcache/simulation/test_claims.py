"""What the index says of a simulated cache."""

from __future__ import annotations

from prefixcache.index.boundaries import boundary_depths
from prefixcache.simulation.claims import Claims
from prefixcache.simulation.lru import LruCache
from prefixcache.types import INDEX_STRIDE, KV_BLOCK_SIZE
from tests.unit.prefixcache.simulation.traces import BLOCK, request

CHAIN = tuple(range(10))


def test_what_is_being_computed_is_no_claim_yet() -> None:
    cache = LruCache(20)
    claims = Claims(cache, lag_s=0.0, block_tokens=BLOCK)
    cache.hold(CHAIN[:4])
    cache.release(CHAIN[:4], 0.0)
    evicted = cache.hold(CHAIN)
    claims.computing(CHAIN, 4, evicted, 1.0)
    assert claims.depth(request(CHAIN), 1.0) == 4
    assert claims.depth(request(CHAIN[:3]), 1.0) == 3
    claims.computed(2.0)
    assert claims.depth(request(CHAIN), 2.0) == 10


def test_another_branch_is_not_hidden() -> None:
    cache = LruCache(20)
    claims = Claims(cache, lag_s=0.0, block_tokens=BLOCK)
    branch = (*CHAIN[:4], 77, 78)
    cache.hold(branch)
    cache.hold(CHAIN)
    claims.computing(CHAIN, 4, (), 1.0)
    assert claims.depth(request(branch), 1.0) == 6


def test_a_lag_shows_what_was() -> None:
    cache = LruCache(10)
    claims = Claims(cache, lag_s=2.0, block_tokens=BLOCK)
    asked = request(CHAIN)
    claims.computing(CHAIN, 0, cache.hold(CHAIN), 0.0)
    claims.computed(5.0)
    cache.release(CHAIN, 5.0)
    assert claims.depth(asked, 6.9) == 0
    assert claims.depth(asked, 7.0) == 10
    other = tuple(range(100, 106))
    claims.computing(other, 0, cache.hold(other), 8.0)
    assert claims.depth(asked, 9.9) == 10
    assert claims.depth(asked, 10.0) == 4
    claims.evicted(cache.hold((200,)), 11.0)
    assert claims.depth(asked, 13.0) == 3


def test_pending_claims_stand_on_boundaries() -> None:
    claims = Claims(LruCache(20), lag_s=0.0, block_tokens=BLOCK)
    placed = request(CHAIN)
    assert claims.pending_depth(placed) == 0
    claims.expect(placed)
    # An equal prompt meets it on the last block; others on the deepest boundary that they share with it.
    assert claims.pending_depth(placed) == 10
    per_block = BLOCK // (KV_BLOCK_SIZE * INDEX_STRIDE)
    for shared in range(1, 10):
        # The deepest boundary of index blocks that lies within what both share, in whole blocks.
        expected = max(depth for depth in boundary_depths(12 * per_block) if depth <= shared * per_block) // per_block
        assert 2 * shared / 3 - 1 < expected <= shared
        assert claims.pending_depth(request((*CHAIN[:shared], *range(90, 102 - shared)))) == expected
    assert claims.pending_depth(request((90, 91))) == 0
    # Of a prompt that ends with the block, the last one is computed in any case.
    assert claims.pending_depth(request(CHAIN[:8], rest=0)) == 7
    claims.expect(placed)
    claims.forget(placed)
    assert claims.pending_depth(placed) == 10
    claims.forget(placed)
    assert claims.pending_depth(placed) == 0
