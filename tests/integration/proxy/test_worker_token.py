"""Proxy and workers with and without the worker token: who is used, who is told what, and that it mends itself."""

from __future__ import annotations

import msgspec
import pytest

from proxy.worker_link import WorkerLink
from tests.support.fake_worker import FakeWorker, says
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import running_proxy
from tests.support.relay import relay_to
from tests.support.tiny_tokenizer import tiny_tokenizer_files
from tests.support.waiting import eventually
from tests.support.worker_harness import running_worker

TOKEN = b"the-token-of-this-test"
OTHER = b"another-token-of-that-test"
MEND = "set the same PREFIXCACHE_WORKER_TOKEN on every proxy and worker"


def lines(caplog: pytest.LogCaptureFixture, name: str, words: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == name and words in r.getMessage()]


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_equal_tokens_serve(store: MemoryStore, token: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        running_worker(store=store, tokenizer=tiny_tokenizer_files(), model="tiny", worker_token=token),
        running_proxy(store, worker_token=token) as proxy,
    ):
        await proxy.ready()
        assert (await proxy.chat(max_tokens=4)).status_code == 200
    assert TOKEN.decode() not in caplog.text


@pytest.mark.parametrize(
    ("on_worker", "on_proxy", "told_by_proxy", "told_by_worker"),
    [
        (TOKEN, None, "the worker has a worker token and this proxy has none", "the proxy has no worker token and"),
        (None, TOKEN, "the worker has no worker token and this proxy has one", "the proxy has a worker token and"),
        (TOKEN, OTHER, "the worker has another worker token", "ended before its proof of the worker token"),
    ],
)
async def test_tokens_that_differ_are_told_on_both_sides_and_no_prompt_is_sent(
    store: MemoryStore,
    on_worker: bytes | None,
    on_proxy: bytes | None,
    told_by_proxy: str,
    told_by_worker: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        running_worker(store=store, tokenizer=tiny_tokenizer_files(), model="tiny", worker_token=on_worker) as running,
        running_proxy(store, worker_token=on_proxy, held_s=0.0) as proxy,
    ):
        await eventually(lambda: len(lines(caplog, "worker.stream", told_by_worker)) >= 3)
        (link,) = proxy.fleet.links
        assert not link.ready and link.stream is None
        assert (await proxy.chat()).status_code == 503
        (told,) = (await proxy.client.get("/health")).json()["workers"]
        assert told["ready"] is False
        (line,) = lines(caplog, "proxy", told_by_proxy)
        assert MEND in line and running.record.worker_id in line
        assert all(MEND in line for line in lines(caplog, "worker.stream", told_by_worker))
        assert running.runner.num_steps == 0
    assert TOKEN.decode() not in caplog.text and OTHER.decode() not in caplog.text


async def test_a_worker_that_gets_the_right_token_later_is_used(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, script=says("hi")) as worker,
        running_proxy(store, worker_token=TOKEN) as proxy,
    ):
        worker.token = OTHER
        await eventually(lambda: worker.num_connections >= 2)
        assert proxy.fleet.num_ready == 0
        worker.token = TOKEN
        await proxy.ready()
        assert (await proxy.chat()).status_code == 200
        assert len(worker.proofs) == 1, "those without the token got no proof of ours"


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_who_passes_on_what_a_true_worker_says_gets_no_prompt(
    store: MemoryStore, token: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who can write to the registry stands between proxy and worker, under an address of his own."""
    async with running_worker(
        store=store, tokenizer=tiny_tokenizer_files(), model="tiny", worker_token=token
    ) as running:
        host, _, port = running.address.rpartition(":")
        async with relay_to((host, int(port))) as relay, running_proxy(store, worker_token=token) as proxy:
            false = msgspec.structs.replace(running.record, worker_id="false", address=relay.address)
            await store.registry().announce(false)
            links: dict[str, WorkerLink] = {}

            def both_known() -> bool:
                links.update({link.worker_id: link for link in proxy.fleet.links})
                return len(links) == 2 and links[running.record.worker_id].ready

            await eventually(both_known)
            if token is None:
                await eventually(lambda: links["false"].ready)
            else:
                await eventually(lambda: lines(caplog, "proxy", "worker false at"))
                assert "the worker has another worker token" in lines(caplog, "proxy", "worker false at")[0]
                assert not links["false"].ready
