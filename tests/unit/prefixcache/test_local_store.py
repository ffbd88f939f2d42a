"""What one process keeps for itself."""

from __future__ import annotations

import pytest

from prefixcache.limits import LEASE_S
from prefixcache.local_store import LocalStore
from prefixcache.store import RedisStore
from proxy.store import Store
from tests.support.manual_clock import ManualClock


async def test_one_index_a_namespace() -> None:
    clock = ManualClock()
    store: Store = LocalStore(clock=clock)
    assert store.index_available
    index = store.index("a" * 16)
    assert store.index("a" * 16) is index and store.index("b" * 16) is not index
    incarnation = (await index.register()).incarnation
    await index.apply(incarnation, 1, [5, 6], [])
    assert (await index.match([5, 6])).depths == {incarnation: 2}
    clock.now += LEASE_S + 1
    assert (await index.match([5, 6])).depths == {}


async def test_no_worker_is_in_it() -> None:
    async with LocalStore.open() as store:
        assert await store.registry().live_workers() == []


@pytest.mark.parametrize("configured", [None, b"s3cret"])
async def test_the_secret_stays_the_same(configured: bytes | None) -> None:
    store = LocalStore()
    secret = await store.deployment_secret(configured)
    assert secret == configured or (configured is None and len(secret) == 32)
    assert await store.deployment_secret(None) == secret
    assert await store.deployment_secret(secret) == secret
    assert await LocalStore().deployment_secret(None) != secret


def test_it_has_what_the_other_store_has() -> None:
    def names(store: type) -> set[str]:
        return {name for name in vars(store) if not name.startswith("_")}

    assert names(RedisStore) - names(LocalStore) == {"ping"}
