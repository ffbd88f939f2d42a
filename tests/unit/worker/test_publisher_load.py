"""The load that goes with every renewal of the lease, and the last word of a worker that ends."""

from __future__ import annotations

import pytest

from tests.support.publisher_world import World, publishing
from tests.support.waiting import eventually


async def test_every_renewal_tells_the_load_of_that_moment() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
        await eventually(lambda: len(world.index.loads) >= 2)
        world.rest_s = 1.5
        await eventually(lambda: world.index.loads[-1].rest_s == 1.5)
        versions = [load.version for load in world.index.loads]
        assert versions == list(range(1, len(versions) + 1))
        assert not any(load.is_draining for load in world.index.loads)
        told = (await world.index.exchange_loads("0" * 16, {}, [incarnation]))[incarnation].worker
        assert told is not None
        assert (told.prefill_rate, told.available_blocks, told.oldest_age_s) == (5, 3, 2)


async def test_versions_go_on_growing_in_a_new_incarnation() -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        await eventually(lambda: len(world.index.loads) >= 2)
        world.index.flush()
        await eventually(lambda: world.publisher.incarnation != first)
        renewals = len(world.index.loads)
        await eventually(lambda: len(world.index.loads) > renewals)
        versions = [load.version for load in world.index.loads]
        assert versions == sorted(set(versions))


async def test_a_worker_that_drains_says_so_at_once_and_keeps_its_lease() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
        await eventually(lambda: world.index.loads)
    await world.publisher.drain()
    assert world.index.loads[-1].is_draining
    assert world.index.loads[-1].version == len(world.index.loads)
    told = (await world.index.exchange_loads("0" * 16, {}, [incarnation]))[incarnation].worker
    assert told is not None and told.is_draining
    assert world.index.is_live(incarnation)
    await world.publisher.close()
    assert not world.index.is_live(incarnation)


async def test_it_says_so_with_every_renewal_as_long_as_it_drains() -> None:
    async with publishing() as world:
        await eventually(lambda: world.index.loads)
        await world.publisher.drain()
        told = len(world.index.loads)
        assert world.index.loads[told - 1].is_draining
        await eventually(lambda: len(world.index.loads) >= told + 2)
        assert all(load.is_draining for load in world.index.loads[told - 1 :])
        world.put(1, 2)
        await world.settled()


async def test_also_in_an_incarnation_that_it_takes_while_it_drains() -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        await world.publisher.drain()
        world.index.flush()
        await eventually(lambda: world.publisher.incarnation != first)
        renewals = len(world.index.loads)
        await eventually(lambda: len(world.index.loads) > renewals)
        assert world.index.loads[-1].is_draining


async def test_draining_without_an_index_or_an_incarnation_ends_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    world = World(reannounce_jitter_s=0.0)
    await world.publisher.drain()
    assert world.index.loads == []
    async with publishing() as world:
        pass
    world.index.faults.unavailable = True
    await world.publisher.drain()
    assert "not told that the worker is draining" in caplog.text
