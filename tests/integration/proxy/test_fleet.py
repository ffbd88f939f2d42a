"""Workers that come, go, restart and disagree."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from prefixcache.limits import WORKER_FAULTS
from proxy import pulse
from proxy.prediction import Predictor
from tests.support.fake_worker import FakeWorker, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, body, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.tiny_tokenizer import tiny_tokenizer_files
from tests.support.waiting import eventually
from tests.unit.proxy.test_load_table import worker_load


async def test_a_worker_that_comes_late_makes_the_proxy_ready(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        assert (await proxy.client.get("/ready")).status_code == 503
        async with FakeWorker.open(store, script=says("hi"), served_names=("tiny", "alias")) as worker:
            await proxy.ready()
            ready = await proxy.client.get("/ready")
            assert (ready.status_code, ready.json()) == (200, {"workers_ready": 1})
            models = (await proxy.client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["alias", "tiny"]
            assert models[0]["object"] == "model" and models[0]["max_model_len"] == 4096
            health = (await proxy.client.get("/health")).json()
            assert health["status"] == "ok" and health["redis"]["reachable"] is True
            (told,) = health["workers"]
            assert told["id"] == "w1" and told["ready"] and told["incarnation"] == worker.record.incarnation
            alias = await proxy.chat(model="alias")
            assert alias.json()["model"] == "alias"
            assert proxy.metric("prefixcache_workers_ready", model="tiny") == 1


async def test_a_tokenizer_is_fetched_once_for_all_its_workers(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, worker_id="w1") as one,
        FakeWorker.open(store, worker_id="w2") as two,
        running_proxy(store) as proxy,
    ):
        await proxy.ready(2)
        paths = one.http_paths + two.http_paths
        assert paths.count("/tokenizer/manifest") == 1
        assert len(paths) == 1 + len(one.files.files)
        one.drop()
        await eventually(lambda: one.num_connections == 2)
        await proxy.ready(2)
        assert one.http_paths + two.http_paths == paths


async def test_two_models_at_once(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, worker_id="w1", model="one", script=says("of one")),
        FakeWorker.open(
            store,
            worker_id="w2",
            model="two",
            script=says("of two"),
            files=tiny_tokenizer_files(special_tokens=["<|x|>"]),
        ),
        running_proxy(store) as proxy,
    ):
        await proxy.ready(2)
        for name, worker_id in (("one", "w1"), ("two", "w2")):
            answer = await proxy.chat(model=name)
            assert answer.headers["x-prefixcache-worker"] == worker_id
        statistics = (await proxy.client.get("/cache/stats")).json()
        assert set(statistics["models"]) == {"one", "two"}
        assert (await proxy.chat(model="three")).status_code == 404


async def test_a_worker_that_leaves_both_registry_and_stream_is_dropped(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy, FakeWorker.open(store, worker_id="w2", script=says("hi")):
        async with FakeWorker.open(store, worker_id="w1", script=says("hi")) as leaving:
            await proxy.ready(2)
            await store.registry().withdraw(leaving.record)
            reads = store.faults.num_calls
            await eventually(lambda: store.faults.num_calls > reads + 2)
            assert proxy.fleet.num_ready == 2, "a stream that stands keeps a worker"
        await eventually(lambda: [link.worker_id for link in proxy.fleet.links] == ["w2"])
        assert proxy.metric("prefixcache_num_requests_running", worker="w1") == 0
        assert (await proxy.chat()).status_code == 200


async def test_a_worker_that_took_a_new_incarnation_while_its_stream_was_cut_is_reannouncing(
    store: MemoryStore,
) -> None:
    """The hello may be the first to tell it, before the registry is read again."""
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        (link,) = proxy.fleet.links
        assert not link.is_reannouncing
        worker.record = msgspec.structs.replace(worker.record, incarnation=worker.record.incarnation + 1)
        worker.drop()
        await eventually(lambda: link.incarnation == worker.record.incarnation)
        assert link.is_reannouncing


async def test_a_worker_that_dies_is_avoided_and_its_model_is_unavailable_not_unknown(store: MemoryStore) -> None:
    async with running_proxy(store, held_s=0.0) as proxy:
        async with FakeWorker.open(store):
            await proxy.ready()
        await proxy.ready(0)
        answer = await proxy.chat()
        assert answer.status_code == 503


async def test_a_worker_restarted_under_its_id_at_another_address(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        async with FakeWorker.open(store, script=says("first life")) as first:
            await proxy.ready()
            assert (await proxy.chat()).status_code == 200
        async with FakeWorker.open(store, script=says("second life")) as second:
            await eventually(lambda: second.num_connections == 1)
            await proxy.ready()
            answer = await proxy.chat()
            assert answer.json()["choices"][0]["message"]["content"] == "second life"
            (link,) = proxy.fleet.links
            assert link.incarnation == second.record.incarnation > first.record.incarnation


async def test_a_worker_restarted_at_the_same_address_is_connected_again(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        async with FakeWorker.open(store, script=says("first life")) as first:
            await proxy.ready()
            port = int(first.record.address.rpartition(":")[2])
        async with FakeWorker.open(store, script=says("second life"), port=port) as second:
            await eventually(lambda: second.num_connections >= 1)
            await proxy.ready()
            assert (await proxy.chat()).json()["choices"][0]["message"]["content"] == "second life"
            (link,) = proxy.fleet.links
            assert link.incarnation == second.record.incarnation


async def test_a_worker_restarted_at_the_same_address_under_another_id_is_one_worker(store: MemoryStore) -> None:
    """As a container does: its address stays, its id is new, and the link to the old one has found it there first."""
    async with running_proxy(store) as proxy, FakeWorker.open(store, worker_id="old") as worker:
        await proxy.ready()
        (link,) = proxy.fleet.links
        asking = asyncio.create_task(proxy.chat())
        frame = await worker.next_generate()
        again = await store.index(worker.record.namespace).register()
        worker.record = msgspec.structs.replace(
            worker.record, worker_id="new", incarnation=again.incarnation, started_at=worker.record.started_at + 1
        )
        await store.registry().announce(worker.record)
        await eventually(lambda: link.is_succeeded)
        await eventually(lambda: [each.worker_id for each in proxy.fleet.links if each.ready] == ["new"])
        worker.step(frame.id, token_ids("hi"))
        worker.end(frame.id)
        answer = await asking
        assert (answer.status_code, answer.headers["x-prefixcache-worker"]) == (200, "old"), "what it has goes on"
        await eventually(lambda: [each.worker_id for each in proxy.fleet.links] == ["new"])
        health = (await proxy.client.get("/health")).json()
        assert [told["id"] for told in health["workers"]] == ["new"]


async def test_a_restarted_worker_that_does_not_say_so_is_known_by_its_record(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        async with FakeWorker.open(store, announce=False) as first:
            first.minor = 2
            await store.registry().announce(first.record)
            await proxy.ready()
            (link,) = proxy.fleet.links
            port = int(first.record.address.rpartition(":")[2])
            for _ in range(WORKER_FAULTS):
                link.breaker.failed()
            process = link.process
            assert link.breaker.is_open
        async with FakeWorker.open(store, port=port, announce=False) as second:
            second.minor = 2
            await proxy.ready()
            assert link.process == process, "nobody knows better yet"
            await store.registry().announce(second.record)
            await eventually(lambda: link.process.started_at == second.record.started_at)
            stream = link.stream
            assert stream is not None and stream.breaker is link.breaker and not link.breaker.is_open
            assert (proxy.fleet.links, link.incarnation) == ([link], second.record.incarnation)


async def test_a_new_incarnation_of_the_same_process_keeps_its_stream(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy, FakeWorker.open(store) as worker:
        await proxy.ready()
        asking = asyncio.create_task(proxy.chat())
        frame = await worker.next_generate()
        again = await store.index(worker.record.namespace).register()
        await store.registry().announce(msgspec.structs.replace(worker.record, incarnation=again.incarnation))
        await eventually(lambda: proxy.fleet.links[0].incarnation == again.incarnation)
        worker.step(frame.id, token_ids("hi"))
        worker.end(frame.id)
        assert (await asking).status_code == 200
        assert worker.num_connections == 1


async def test_a_worker_restarted_in_place_is_known_by_its_hello_until_it_has_registered(store: MemoryStore) -> None:
    """Its old record, which may stand for a while, brings back neither old claims nor a new connection."""
    async with running_proxy(store) as proxy, FakeWorker.open(store) as worker:
        await proxy.ready()
        (link,) = proxy.fleet.links
        worker.record = msgspec.structs.replace(worker.record, incarnation=0, started_at=worker.record.started_at + 1)
        worker.drop()
        await eventually(lambda: worker.num_connections == 2)
        await proxy.ready()
        read_at = proxy.fleet.registry_read_at
        await eventually(lambda: proxy.fleet.registry_read_at != read_at)
        assert (link.incarnation, link.process.started_at) == (0, worker.record.started_at)
        asking = asyncio.create_task(proxy.chat())
        frame = await worker.next_generate()
        again = await store.index(worker.record.namespace).register()
        await store.registry().announce(msgspec.structs.replace(worker.record, incarnation=again.incarnation))
        await eventually(lambda: link.incarnation == again.incarnation)
        worker.step(frame.id, token_ids("hi"))
        worker.end(frame.id)
        assert (await asking).status_code == 200
        assert (proxy.fleet.links, worker.num_connections) == ([link], 2)


async def test_an_outage_of_the_store_keeps_the_known_workers(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_proxy(store) as proxy, FakeWorker.open(store, script=says("hi")) as worker:
        await proxy.ready()
        store.unavailable = True
        await eventually(lambda: not proxy.fleet.registry_reachable)
        long_prompt = [{"role": "user", "content": "word " * 200}]
        for _ in range(5):
            assert (await proxy.chat(messages=long_prompt)).status_code == 200
        assert proxy.metric("prefixcache_index_lookup_failures_total") == 5
        assert (await proxy.client.get("/ready")).status_code == 200
        assert (await proxy.client.get("/health")).json()["redis"]["reachable"] is False
        worker.drop()
        await eventually(lambda: worker.num_connections == 2)
        await proxy.ready()
        assert (await proxy.chat()).status_code == 200
        warnings = [r for r in caplog.records if r.name == "proxy" and "did not answer" in r.getMessage()]
        assert len(warnings) == 1
        store.unavailable = False
        await eventually(lambda: proxy.fleet.registry_reachable)


async def test_a_store_that_is_down_at_the_start(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hi")):
        store.unavailable = True
        async with running_proxy(store) as proxy:
            await eventually(lambda: store.faults.num_calls > 3)
            assert (await proxy.chat()).status_code == 503
            assert (await proxy.client.get("/health")).status_code == 200
            store.unavailable = False
            await proxy.ready()
            await eventually(lambda: _answers(proxy))


async def _answers(proxy: RunningProxy) -> bool:
    return (await proxy.chat()).status_code == 200


async def test_the_configured_secret_and_the_one_in_the_store(store: MemoryStore) -> None:
    roots = []
    async with FakeWorker.open(store, script=says("hi")) as worker:
        for secret in (b"mine", b"other", None):
            async with running_proxy(store, secret=secret) as proxy:
                await proxy.ready()
                await eventually(lambda: _answers(proxy))
                roots.append(worker.generates[-1].root)
    assert roots[0] == roots[1] == roots[2], "what stands in the store wins"
    other = MemoryStore(lease_s=float("inf"))
    async with FakeWorker.open(other, script=says("hi")) as worker, running_proxy(other, secret=b"other") as proxy:
        await proxy.ready()
        await eventually(lambda: _answers(proxy))
        assert worker.generates[-1].root != roots[0]


async def test_files_that_do_not_have_the_registered_fingerprint_are_refused(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy, FakeWorker.open(store, announce=False) as worker:
        worker.served_files = {**worker.files.files, "chat_template.jinja": b"another template"}
        await store.registry().announce(worker.record)
        await eventually(lambda: worker.http_paths.count("/tokenizer/manifest") >= 2)
        assert proxy.fleet.num_ready == 0
        worker.served_files = None
        await proxy.ready()


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": b"{}", "../../etc/passwd": b"x"},
        {"tokenizer.json": b"{}", "weights.bin": b"x"},
        {},
        {"tokenizer.json": b"not a tokenizer"},
    ],
)
async def test_odd_tokenizer_files_are_refused(store: MemoryStore, files: dict[str, bytes]) -> None:
    async with running_proxy(store, held_s=0.0) as proxy, FakeWorker.open(store, announce=False) as worker:
        worker.served_files = files
        await store.registry().announce(worker.record)
        await eventually(lambda: worker.http_paths.count("/tokenizer/manifest") >= 2)
        assert proxy.fleet.num_ready == 0
        assert not any("passwd" in path or "weights" in path for path in worker.http_paths)
        assert (await proxy.chat()).status_code == 503


async def test_a_worker_of_another_namespace_at_that_address_is_refused(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_proxy(store) as proxy, FakeWorker.open(store, announce=False) as worker:
        worker.hello_namespace = "f" * 16
        await store.registry().announce(worker.record)
        await eventually(lambda: worker.num_connections >= 3)
        assert proxy.fleet.num_ready == 0
        assert "namespace" in caplog.text
        assert sum("is not reachable" in record.getMessage() for record in caplog.records) == 1
        worker.hello_namespace = None
        await proxy.ready()


@pytest.mark.parametrize("address", [f"{'h' * 70}.test:80", "..:80", "127.0.0.1:99999"])
@pytest.mark.parametrize("knows_tokenizer", [True, False])
async def test_an_address_that_names_no_host_is_not_reachable(
    store: MemoryStore, caplog: pytest.LogCaptureFixture, address: str, *, knows_tokenizer: bool
) -> None:
    async with running_proxy(store) as proxy, FakeWorker.open(store, announce=knows_tokenizer) as worker:
        if knows_tokenizer:
            await proxy.ready()
        odd = msgspec.structs.replace(worker.record, worker_id="odd", address=address)
        await store.registry().announce(odd)
        await eventually(lambda: "worker odd at" in caplog.text)
    assert sum("is not reachable" in record.getMessage() for record in caplog.records) == 1
    assert not any(record.exc_info for record in caplog.records)


async def test_one_name_in_two_namespaces_goes_where_most_workers_are(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_proxy(store) as proxy,
        FakeWorker.open(store, worker_id="a", revision="r1", script=says("hi")),
        FakeWorker.open(store, worker_id="b", revision="r2", script=says("hi")),
    ):
        await proxy.ready(2)
        served = {(await proxy.chat()).headers["x-prefixcache-worker"] for _ in range(5)}
        assert served == {"b"}, "the newest of equally many"
        async with FakeWorker.open(store, worker_id="c", revision="r1", script=says("hi")):
            await proxy.ready(3)
            served = {(await proxy.chat()).headers["x-prefixcache-worker"] for _ in range(10)}
            assert served and served <= {"a", "c"}
        told = [record for record in caplog.records if "namespaces serve" in record.getMessage()]
        assert len(told) == 2, "once for each choice"


async def test_requests_go_to_the_least_waiting_worker(store: MemoryStore) -> None:
    async with (
        running_proxy(store) as proxy,
        FakeWorker.open(store, worker_id="a") as a,
        FakeWorker.open(store, worker_id="b") as b,
    ):
        await proxy.ready(2)
        asking = [asyncio.create_task(proxy.chat()) for _ in range(6)]
        await eventually(lambda: len(a.generates) + len(b.generates) == 6)
        assert (len(a.generates), len(b.generates)) == (3, 3)
        for worker in (a, b):
            for frame in worker.generates:
                worker.step(frame.id, token_ids("hi"))
                worker.end(frame.id)
        assert [(await task).status_code for task in asking] == [200] * 6
        a.beat(waiting=4, running=1)
        await eventually(lambda: any(link.num_waiting == 4 for link in proxy.fleet.links))
        task = asyncio.create_task(proxy.chat())
        await eventually(lambda: len(b.generates) == 4)
        b.end(b.generates[-1].id)
        await task
        assert proxy.metric("prefixcache_num_requests_waiting") == 0, "others' requests are not ours"


async def test_a_proxy_that_stops_lets_streams_end_and_tells_those_that_take_longer(store: MemoryStore) -> None:
    async with FakeWorker.open(store) as worker, AsyncExitStack() as connections:
        async with running_proxy(store, drain_s=0.3) as proxy:
            await proxy.ready()
            opened = [await connections.enter_async_context(raw_connection(proxy.port)) for _ in range(2)]
            ids = []
            for connection in opened:
                connection.send(post("/v1/chat/completions", body(stream=True)))
                ids.append((await worker.next_generate()).id)
                worker.step(ids[-1], token_ids("hi"))
                await connection.head()
            asyncio.get_running_loop().call_later(0.1, worker.end, ids[0])
        ending, told = [await connection.read_all() for connection in opened]
        assert ending.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"hi" in told and b"the proxy is shutting down" in told and b"[DONE]" not in told
        assert told.endswith(b"\r\n0\r\n\r\n")
        await eventually(lambda: worker.aborts == [ids[1]])


async def test_a_worker_that_fell_silent_gets_no_new_request_while_another_one_may(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "WORKER_SUSPECT_S", 0.5)
    monkeypatch.setattr(pulse, "WORKER_SILENCE_S", 60.0)
    async with (
        FakeWorker.open(store, worker_id="alive", script=says("alive")) as alive,
        FakeWorker.open(store, worker_id="silent", script=says("silent")) as silent,
        running_proxy(store) as proxy,
    ):
        await proxy.ready(2)
        alive.is_mute = silent.is_mute = True
        links = {link.worker_id: link for link in proxy.fleet.links}

        async def keep_beating() -> None:
            while True:
                alive.beat()
                await asyncio.sleep(0.05)

        beating = asyncio.create_task(keep_beating())
        await eventually(lambda: links["silent"].is_silent)
        for _ in range(8):
            assert (await proxy.chat()).headers["x-prefixcache-worker"] == "alive"
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await eventually(lambda: links["alive"].is_silent)
        assert (await proxy.chat()).status_code == 200, "where all are silent, it may be the proxy that is late"


async def test_a_worker_whose_step_hangs_gets_no_new_request_while_another_one_may(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "SUSPECT_SHARE", 0.05)
    async with (
        FakeWorker.open(store, worker_id="hung") as hung,
        running_proxy(store) as proxy,
        asyncio.TaskGroup() as group,
    ):
        await proxy.ready()
        waiting = group.create_task(proxy.chat())
        request = await hung.next_generate()
        hung.started(request.id)

        async def keep_beating() -> None:
            while True:
                hung.beat(running=1)
                await asyncio.sleep(0.05)

        beating = group.create_task(keep_beating())
        (link,) = proxy.fleet.links
        await eventually(lambda: link.is_silent)
        async with FakeWorker.open(store, worker_id="good", script=says("hi")):
            await proxy.ready(2)
            for _ in range(8):
                assert (await proxy.chat()).headers["x-prefixcache-worker"] == "good"
        beating.cancel()
        hung.end(request.id)
        assert (await waiting).status_code == 200


async def test_a_slow_worker_has_as_long_for_a_step_as_its_measured_rate_says(store: MemoryStore) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        (link,) = proxy.fleet.links
        assert link._measured_rate(link) is None
        index = store.index(worker.record.namespace)
        await index.renew(worker.record.incarnation, load=worker_load(prefill_rate=50.0))
        await eventually(lambda: link._measured_rate(link) == 50.0)


async def test_a_stop_waits_for_a_request_that_is_not_on_a_worker_yet(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeWorker.open(store, script=says("whole")), AsyncExitStack() as connections:
        async with running_proxy(store) as proxy:
            await proxy.ready()
            matching, go_on = asyncio.Event(), asyncio.Event()

            async def slow_match(*_: object) -> None:
                matching.set()
                await go_on.wait()

            monkeypatch.setattr(Predictor, "match", slow_match)
            connection = await connections.enter_async_context(raw_connection(proxy.port))
            connection.send(post("/v1/chat/completions", body(stream=True)))
            await matching.wait()
            asyncio.get_running_loop().call_later(0.2, go_on.set)
        assert (await connection.read_all()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
