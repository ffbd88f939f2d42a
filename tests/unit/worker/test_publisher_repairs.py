"""What the index says wrong is mended by the worker's own numbered batches, in both directions."""

from __future__ import annotations

from tests.support.publisher_world import World, publishing
from tests.support.seeds import seeded
from tests.support.waiting import eventually


async def settled_but_for_the_index(world: World) -> None:
    """Until there is nothing left to tell."""
    await eventually(lambda: not world.changes and world.publisher._unanswered is None)


async def test_a_claim_that_the_index_lost_is_stored_again() -> None:
    async with publishing() as world:
        world.index.forgets = True
        world.put(1, 2)
        await settled_but_for_the_index(world)
        assert world.told() == set()
        world.index.forgets = False
        world.repair(1, 2)
        await world.settled()
        assert [batch[1:] for batch in world.index.batches] == [(1, (1, 2), ()), (2, (1, 2), ())]


async def test_a_claim_of_nothing_is_removed() -> None:
    async with publishing() as world:
        world.put(1, 2)
        await world.settled()
        world.index.forgets = True
        world.drop(2)
        await settled_but_for_the_index(world)
        assert world.told() == {1, 2}
        world.index.forgets = False
        world.repair(2)
        await world.settled()
        assert world.told() == {1}


async def test_what_was_read_of_an_earlier_incarnation_is_not_mended() -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.put(1)
        await world.settled()
        world.index.flush()
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()
        num_batches = len(world.index.batches)
        world.changes.repair(first, [1, 2])
        assert not world.changes
        assert len(world.index.batches) == num_batches


async def test_an_index_that_loses_batches_is_true_once_all_was_read() -> None:
    random = seeded("lost batches")
    async with publishing() as world:
        for _ in range(60):
            world.index.forgets = random.random() < 0.4
            value = random.randrange(20)
            if value in world.changes.held():
                world.drop(value)
            else:
                world.put(value)
            if random.random() < 0.3:
                await settled_but_for_the_index(world)
            if random.random() < 0.3:
                world.repair(random.randrange(20))
        world.index.forgets = False
        await settled_but_for_the_index(world)
        world.repair(*range(20))
        await world.settled()
