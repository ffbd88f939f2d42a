"""The publisher against an index in memory whose answers fail, get lost or say that all is gone."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from prefixcache.index.base import ApplyAnswer, ApplyStatus
from prefixcache.limits import MAX_APPLY_HASHES
from tests.support.publisher_world import World, publishing
from tests.support.seeds import seeded
from tests.support.waiting import eventually


async def test_it_registers_announces_and_publishes_changes() -> None:
    async with publishing() as world:
        record = world.registry.records["w"]
        assert record.incarnation == world.publisher.incarnation > 0
        world.put(1, 2, 3)
        await world.settled()
        world.drop(2)
        world.put(4)
        await world.settled()
        assert [batch for _, batch, _, _ in world.index.batches] == [1, 2]
        assert world.metrics.published_hashes.labels("stored")._value.get() == 4
        assert world.metrics.published_hashes.labels("removed")._value.get() == 1


async def test_a_store_restored_from_an_older_copy_is_told_everything_again_though_nothing_changed() -> None:
    async with publishing(check_s=0.1) as world:
        first = world.publisher.incarnation
        world.put(1, 2)
        await world.settled()
        world.drop(1)
        world.put(3)
        await world.settled()
        await world.index.rewind(first, batch=1, held={1, 2})
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()
        assert not world.index.is_live(first)


async def test_without_changes_only_empty_batches_ask_whether_the_last_one_is_known() -> None:
    async with publishing(check_s=0.1) as world:
        world.put(1)
        await eventually(lambda: len(world.index.batches) >= 4)
        incarnation = world.publisher.incarnation
        assert world.index.batches[:4] == [(incarnation, 1, (1,), ())] + [
            (incarnation, number, (), ()) for number in (2, 3, 4)
        ]


async def test_changes_are_published_promptly_not_at_the_next_renewal() -> None:
    world = World(reannounce_jitter_s=0.0)
    world.publisher._renewal_s = 60.0
    task = asyncio.create_task(world.publisher.run())
    await world.publisher.registered()
    world.put(1)
    await eventually(lambda: world.told() == {1}, timeout_s=1.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.index.check_integrity()


async def test_what_changes_soon_after_a_batch_goes_in_one() -> None:
    async with publishing() as world:
        world.publisher._pause_s = 0.2
        world.put(1)
        await world.settled()
        for value in (2, 3, 4):
            world.put(value)
            for _ in range(10):
                await asyncio.sleep(0)
        await world.settled()
        assert [stored for _, _, stored, _ in world.index.batches] == [(1,), (2, 3, 4)]


async def test_many_changes_go_in_batches_of_the_allowed_size() -> None:
    async with publishing() as world:
        world.put(*range(3 * MAX_APPLY_HASHES + 5))
        await world.settled()
        sizes = [len(stored) for _, _, stored, _ in world.index.batches]
        assert sizes == [MAX_APPLY_HASHES] * 3 + [5]
        assert [batch for _, batch, _, _ in world.index.batches] == [1, 2, 3, 4]


async def test_an_unanswered_batch_is_sent_again_identically_and_old_is_an_answer() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
        world.index.answers_to_lose = 2
        world.put(1, 2)
        await eventually(lambda: len(world.index.batches) >= 1)
        world.drop(1)
        world.put(3)
        await world.settled()
        assert world.index.batches == [(incarnation, 1, (1, 2), ())] * 3 + [(incarnation, 2, (3,), (1,))]
        assert world.publisher.incarnation == incarnation
        assert world.metrics.publish_failures._value.get() == 2


async def test_an_outage_loses_nothing_and_keeps_the_incarnation() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
        world.put(1, 2)
        await world.settled()
        world.index.faults.unavailable = True
        world.drop(1)
        world.put(3)
        await eventually(lambda: world.metrics.publish_failures._value.get() >= 2)
        world.index.faults.unavailable = False
        await world.settled()
        assert world.publisher.incarnation == incarnation


async def test_a_store_that_takes_leases_and_no_claims_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """As one whose memory is full does."""
    caplog.set_level(logging.INFO, "worker.publisher")
    async with publishing() as world:
        caplog.clear()
        world.index.refuses_batches = True
        world.put(1)
        renewals = world.index.num_renewals
        await eventually(lambda: len(world.index.batches) >= 3 and world.index.num_renewals >= renewals + 3)
        world.index.refuses_batches = False
        await world.settled()
    assert [record.message for record in caplog.records] == [
        "the index does not take everything: its memory is full",
        "the index takes everything again",
    ]


async def test_it_waits_for_an_index_that_is_down_at_first() -> None:
    async with publishing(is_up=False) as world:
        world.put(1)
        await eventually(lambda: world.index.faults.num_calls >= 3)
        assert world.publisher.incarnation == 0
        world.index.faults.unavailable = False
        await asyncio.wait_for(world.publisher.registered(), 5)
        await world.settled()


async def test_an_expired_lease_comes_back_with_the_next_renewal() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
        world.index.expire(incarnation)
        await eventually(lambda: world.index.is_live(incarnation))
        assert world.publisher.incarnation == incarnation


async def test_a_flushed_index_gets_a_new_incarnation_and_everything_again() -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.put(*range(300))
        await world.settled()
        world.index.flush()
        world.registry.records.clear()
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()
        assert world.registry.records["w"].incarnation == world.publisher.incarnation
        assert world.index.batches[-1][1] == 2


@pytest.mark.parametrize("status", ["gap", "dead", "old"])
async def test_an_answer_that_contradicts_what_was_sent_begins_anew(status: ApplyStatus) -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.put(1)
        await world.settled()
        world.index.next_answer = ApplyAnswer(status=status, index_id=world.index._index_id)
        world.put(2)
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()
        assert world.told() == {1, 2}
        assert not world.index.is_live(first)


async def test_another_index_id_begins_anew() -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.index.next_answer = ApplyAnswer(status="ok", index_id="another")
        world.put(1)
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()


async def test_an_unexpected_error_is_logged_and_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing() as world:
        first = world.publisher.incarnation
        world.index.next_error = ZeroDivisionError("a bug")
        world.put(1)
        await eventually(lambda: world.publisher.incarnation != first)
        await world.settled()
        assert "a bug" in caplog.text


async def test_only_a_fault_spreads_the_announcement_and_the_lease_is_kept_meanwhile() -> None:
    async with publishing(reannounce_jitter_s=1_000.0) as world:
        first = world.publisher.incarnation
        world.put(1)
        await world.settled()
        world.index.flush()
        await eventually(lambda: world.publisher.incarnation != first)
        renewals = world.index.num_renewals
        await eventually(lambda: world.index.num_renewals >= renewals + 3)
        assert world.told() == set()
        assert world.registry.records["w"].incarnation == world.publisher.incarnation


async def test_a_record_that_could_not_be_announced_is_announced_later() -> None:
    world = World(reannounce_jitter_s=0.0)
    world.store.fail_next(2)
    task = asyncio.create_task(world.publisher.run())
    await asyncio.wait_for(world.publisher.registered(), 5)
    assert world.registry.records["w"].incarnation == world.publisher.incarnation
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_record_that_was_lost_comes_back_but_never_over_that_of_another_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.publisher.LEASE_S", 0.05)
    async with publishing() as world:
        own = world.publisher.record
        world.registry.records.clear()
        await eventually(lambda: world.registry.records.get("w") == own)
        taken = msgspec.structs.replace(own, address="127.0.0.1:2")
        world.registry.records["w"] = taken
        renewals = world.index.num_renewals
        await eventually(lambda: world.index.num_renewals >= renewals + 10)
        assert world.registry.records["w"] == taken
        del world.registry.records["w"]
        await eventually(lambda: world.registry.records.get("w") == own)


async def test_closing_leaves_the_record_of_the_one_that_took_the_name() -> None:
    async with publishing() as world:
        pass
    taken = msgspec.structs.replace(world.publisher.record, address="127.0.0.1:2")
    world.registry.records["w"] = taken
    await world.publisher.close()
    assert world.registry.records == {"w": taken}


async def test_closing_ends_the_lease_and_withdraws_the_record() -> None:
    async with publishing() as world:
        incarnation = world.publisher.incarnation
    await world.publisher.close()
    assert not world.index.is_live(incarnation)
    assert "w" not in world.registry.records


async def test_closing_without_an_index_ends_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing() as world:
        pass
    world.index.faults.unavailable = True
    world.store.unavailable = True
    await world.publisher.close()
    assert "not retired" in caplog.text
    assert "not withdrawn" in caplog.text


async def test_random_faults_never_leave_the_index_wrong() -> None:
    random = seeded("publisher")
    async with publishing() as world:
        for _ in range(300):
            action = random.random()
            held = sorted(world.changes.held())
            if action < 0.5:
                world.put(*{random.randrange(60) for _ in range(5)}.difference(held))
            elif action < 0.8 and held:
                world.drop(*{random.choice(held) for _ in range(3)})
            elif action < 0.86:
                world.index.answers_to_lose = random.randrange(3)
            elif action < 0.92:
                world.index.faults.fail_next(random.randrange(3))
            elif action < 0.94:
                world.index.flush()
            await asyncio.sleep(0.001 if random.random() < 0.3 else 0)
        await world.settled()
