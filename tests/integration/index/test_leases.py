"""Leases run on the server's clock; writes of an incarnation are fenced by the content it was registered in."""

from __future__ import annotations

import pytest

from prefixcache.errors import IndexUnavailable
from tests.integration.index.worlds import KEYS, redis_world
from tests.support.valkey import Server
from tests.support.waiting import eventually


async def test_lease_runs_out_by_itself_and_comes_back(any_server: Server) -> None:
    async with redis_world(any_server, lease_s=0.15) as world:
        one = (await world.index.register()).incarnation
        await world.index.apply(one, 1, [1, 2], [])

        async def hidden() -> bool:
            return (await world.index.match([1, 2])).depths == {}

        await eventually(hidden)
        assert (await world.index.apply(one, 2, [3], [])).status == "ok"
        assert await world.index.renew(one)
        assert (await world.index.match([1, 2, 3])).depths == {one: 3}


async def test_renewal_that_changes_nothing_is_no_lost_lease(any_server: Server) -> None:
    """ZADD XX answers 0 or, with CH and within one millisecond, 0 again: neither may be read as a lost lease."""
    async with redis_world(any_server) as world:
        one = (await world.index.register()).incarnation
        for _ in range(200):
            assert await world.index.renew(one)


async def test_writer_that_missed_a_flush_cannot_write_for_the_new_owner_of_its_id(any_server: Server) -> None:
    """A store that forgot everything gives an id again within the second: the index_id tells the two apart."""
    async with redis_world(any_server) as stale_world, redis_world(any_server) as fresh_world:
        stale, fresh = stale_world.index, fresh_world.index
        before = await stale.register()
        await stale.apply(before.incarnation, 1, [1], [])
        any_server.flush()
        any_server.command("HSET", KEYS.meta, "last_id", before.incarnation - 1)
        after = await fresh.register()
        if after.incarnation != before.incarnation:  # the second is over: take the id by hand
            any_server.command("ZADD", KEYS.live, 2**52, before.incarnation)
            any_server.command("HSET", KEYS.batches, before.incarnation, 0)
        answer = await stale.apply(before.incarnation, 1, [2], [])
        assert (answer.status, answer.index_id) == ("dead", after.index_id)
        assert not await stale.renew(before.incarnation)
        await stale.retire(before.incarnation)
        assert await fresh.renew(after.incarnation)
        assert (await fresh.match([1, 2])).depths == {}
        assert (await fresh.apply(after.incarnation, 1, [2], [])).status == "ok"
        again = await stale.register()
        assert again.incarnation > before.incarnation


async def test_ids_follow_the_clock_and_the_last_one(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        first = (await world.index.register()).incarnation
        any_server.command("HSET", KEYS.meta, "last_id", first + 1_000)
        assert (await world.index.register()).incarnation == first + 1_001
        any_server.command("HSET", KEYS.meta, "last_id", 5)  # rewound: the clock and the writer's memory hold
        assert (await world.index.register()).incarnation == first + 1_002


@pytest.mark.parametrize("last_id", ["", "abc", "-5", "nan", "1e3"])
async def test_a_last_id_that_is_no_number_is_none(any_server: Server, last_id: str) -> None:
    async with redis_world(any_server) as world:
        any_server.command("HSET", KEYS.meta, "last_id", last_id)
        first = (await world.index.register()).incarnation
        assert 0 < first < 2**30
        assert (await world.index.register()).incarnation == first + 1


async def test_ids_are_used_up_with_an_error(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        any_server.command("HSET", KEYS.meta, "last_id", 2**30 - 3)
        assert (await world.index.register()).incarnation == 2**30 - 2
        with pytest.raises(IndexUnavailable, match="used up"):
            await world.index.register()
