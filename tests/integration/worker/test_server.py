"""The worker's one port over real sockets: protocol v1 and HTTP, sound and broken."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine

import aiohttp
import msgspec
import pytest
import uvloop

from prefixcache import limits
from prefixcache.errors import ConfigError
from prefixcache.protocol import Abort, Accepted, Beat, End, Fail, Hello, Started, Step, encode
from tests.support.memory_store import MemoryStore
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner, expected_output
from tests.support.seeds import seeded
from tests.support.stream_client import StreamClient, connected
from tests.support.waiting import eventually
from tests.support.worker_harness import PlainTokenizer, RunningWorker, running_worker
from worker.config import Address
from worker.server import bind

PROMPT = list(range(40))


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_output(prompt, num_tokens, vocab_size=1_000)


async def is_idle(running: RunningWorker) -> None:
    """Until no request is left and no block is in use."""

    def idle() -> bool:
        load = running.engine.load
        return load.running == load.waiting == 0 and running.worker.metrics.kv_cache_usage._value.get() == 0

    await eventually(idle)


async def test_a_request_from_hello_to_end() -> None:
    async with running_worker() as running, connected(running.address) as client:
        hello = await client.hello(running.record.namespace)
        assert hello.namespace == running.record.namespace
        assert hello.incarnation == running.record.incarnation > 0
        client.send(generate("a", PROMPT))
        end = await client.ended("a")
        assert isinstance(end, End)
        frames = [frame for frame in client.received if not isinstance(frame, Beat | Hello)]
        assert frames[0] == Accepted(id="a", position=0)
        assert frames[1] == Started(id="a", cached_tokens=0)
        assert [type(frame) for frame in frames[2:]] == [Step] * 4 + [End]
        assert [entry.index for entry in client.entries("a")] == [0, 1, 2, 3]
        assert client.tokens("a") == expected(PROMPT, 4)


async def test_one_step_frame_carries_all_streams_of_a_connection() -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        running.runner.pause()
        client.send(*(generate(name, [*PROMPT, ord(name)], max_tokens=6) for name in "abc"))
        await eventually(lambda: running.engine.load.waiting + running.engine.load.running == 3)
        running.runner.resume()
        for name in "abc":
            await client.ended(name)
            assert client.tokens(name) == expected([*PROMPT, ord(name)], 6)
        steps = [frame for frame in client.received if isinstance(frame, Step)]
        assert max(len(step.entries) for step in steps) == 3
        assert len(steps) <= running.runner.num_steps


async def test_two_connections_may_use_the_same_id() -> None:
    async with (
        running_worker() as running,
        connected(running.address, namespace=running.record.namespace) as one,
        connected(running.address, namespace=running.record.namespace) as other,
    ):
        one.send(generate("a", [1, 2, 3]))
        other.send(generate("a", [4, 5, 6]))
        await asyncio.gather(one.ended("a"), other.ended("a"))
        assert one.tokens("a") == expected([1, 2, 3], 4)
        assert other.tokens("a") == expected([4, 5, 6], 4)


async def test_frames_may_be_cut_anywhere() -> None:
    random = seeded("cuts")
    async with running_worker() as running:
        data = encode(Hello(namespace=running.record.namespace))
        data += b"".join(encode(generate(f"r{number}", [*PROMPT, number])) for number in range(5))
        for _ in range(5):
            cuts = sorted(random.randrange(1, len(data)) for _ in range(random.randrange(20)))
            async with connected(running.address) as client:
                await client.send_cut(data, cuts)
                for number in range(5):
                    assert isinstance(await client.ended(f"r{number}"), End)
        async with connected(running.address) as client:
            await client.send_cut(data[:200], range(1, 200))
            client.send_bytes(data[200:])
            assert isinstance(await client.ended("r4"), End)


# --- broken peers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (encode(Hello(namespace="other")), "namespace other"),
        (encode(Hello(namespace="?", major=2)), "protocol 2.0"),
        (encode(Abort(id="a")), "Abort frame before hello"),
        (encode(generate("a", [1])), "Generate frame before hello"),
        (b"\x00\x00\x00\x01\xc1", "not a protocol v1 map"),
        (b"\x00\x00\x00\x00", "not a protocol v1 map"),
        (b"\x04\x00\x00\x01", "over the limit"),
        (b"\x00\x10\x00\x00" + bytes(limits.MAX_HELLO_BYTES), "no hello within the first"),
    ],
)
async def test_a_stream_that_does_not_begin_with_a_fitting_hello_is_closed(
    first: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker() as running:
        async with connected(running.address) as client:
            client.send_bytes(first)
            await client.closed()
            assert all(isinstance(frame, Hello) for frame in client.received)
        assert reason in caplog.text
        assert running.engine.load.waiting == 0


async def test_a_broken_stream_closes_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        running_worker(ScriptedRunner(step_delay_s=0.001)) as running,
        connected(running.address, namespace=running.record.namespace) as sound,
        connected(running.address, namespace=running.record.namespace) as broken,
    ):
        sound.send(generate("a", PROMPT, max_tokens=50))
        broken.send(generate("b", PROMPT, max_tokens=3_000))
        broken.send_bytes(b"\x00\x00\x00\x02\xff\xff")
        await broken.closed()
        assert isinstance(await sound.ended("a"), End)
        assert "not a protocol v1 map" in caplog.text
        await is_idle(running)


@pytest.mark.parametrize("misuse", ["second hello", "id in use"])
async def test_a_proxy_that_breaks_the_order_is_cut_off(misuse: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker(ScriptedRunner(step_delay_s=0.001)) as running:
        async with connected(running.address, namespace=running.record.namespace) as client:
            client.send(generate("a", PROMPT, max_tokens=3_000))
            again = Hello(namespace=running.record.namespace) if misuse == "second hello" else generate("a", [1])
            client.send(again)
            await client.closed()
        assert ("a second hello" if misuse == "second hello" else "'a' is in use") in caplog.text
        await is_idle(running)


def malformed(**changes: object) -> bytes:
    """A generate frame with fields of the wrong type or absent."""
    fields = msgspec.to_builtins(generate("bad", [1, 2]), builtin_types=(bytes,)) | {"type": "generate"} | changes
    body = msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not None})
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (malformed(prompt_ids=[1, 2]), "prompt_ids"),
        (malformed(prompt_ids=None), "prompt_ids"),
        (malformed(max_tokens="many"), "max_tokens"),
        (malformed(sampling={"temperature": 1.0}), "seed"),
        (malformed(prompt_ids=b"abc"), "3 bytes"),
        (malformed(prompt_ids=b""), "empty"),
        (malformed(root=-1), "root"),
        (encode(generate("bad", [5_000])), "token id 5000"),
        (encode(generate("bad", [1] * 4_097)), "context length of 4096"),
    ],
)
async def test_a_malformed_request_is_refused_and_nothing_else_is_disturbed(frame: bytes, message: str) -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        client.send(generate("good", PROMPT))
        client.send_bytes(frame)
        fail = await client.ended("bad")
        assert isinstance(fail, Fail)
        assert fail.kind == "refused"
        assert message in fail.message
        assert isinstance(await client.ended("good"), End)


async def test_unknown_frames_and_fields_are_ignored() -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        body = msgspec.msgpack.encode({"type": "from_the_future", "id": "x"})
        client.send_bytes(len(body).to_bytes(4, "big") + body)
        client.send_bytes(malformed(id="a", waited_s=1.5))
        assert isinstance(await client.ended("a"), End)


async def test_a_silent_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server.HELLO_TIMEOUT_S", 0.02)
    monkeypatch.setattr("worker.stream.HELLO_TIMEOUT_S", 0.02)
    async with running_worker() as running:
        async with connected(running.address) as silent:
            await silent.closed()
        async with connected(running.address) as half:
            half.send_bytes(b"\x00\x00")
            await half.closed()


async def test_a_peer_that_does_not_read_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker(ScriptedRunner(num_blocks=600)) as running:
        running.worker.server._max_backlog_bytes = 20_000
        host, _, port = running.address.rpartition(":")
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            peer.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(peer, (host, int(port)))
            await loop.sock_sendall(peer, encode(Hello(namespace=running.record.namespace)))
            refused = encode(generate("x" * 60_000, [5_000]))
            while "bytes unread" not in caplog.text:
                try:
                    await asyncio.wait_for(loop.sock_sendall(peer, refused), 0.2)
                except (ConnectionError, TimeoutError):
                    break
            await eventually(lambda: "bytes unread" in caplog.text)


# --- ends -------------------------------------------------------------------------------------------------


async def test_abort_is_answered_by_an_end() -> None:
    runner = ScriptedRunner(step_delay_s=0.001)
    async with (
        running_worker(runner) as running,
        connected(running.address, namespace=running.record.namespace) as client,
    ):
        client.send(generate("a", PROMPT, max_tokens=3_000))
        await eventually(lambda: running.runner.num_steps > 3)
        client.send(Abort(id="a"), Abort(id="nobody"))
        end = await client.ended("a")
        assert isinstance(end, End)
        assert end.reason == "aborted"
        assert end.usage.output_tokens == len(client.tokens("a"))


async def test_a_lost_connection_aborts_its_requests_only() -> None:
    runner = ScriptedRunner(step_delay_s=0.001)
    async with (
        running_worker(runner) as running,
        connected(running.address, namespace=running.record.namespace) as staying,
    ):
        async with connected(running.address, namespace=running.record.namespace) as leaving:
            leaving.send(generate("a", PROMPT, max_tokens=3_000), generate("b", [7] * 30, max_tokens=3_000))
            staying.send(generate("a", [*PROMPT, 1], max_tokens=60))
            await eventually(lambda: running.engine.load.running == 3)
        assert isinstance(await staying.ended("a"), End)
        assert staying.tokens("a") == expected([*PROMPT, 1], 60)
        await is_idle(running)


async def test_too_many_waiting_requests_are_told_so() -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        running.engine._max_waiting = 1
        running.runner.pause()
        client.send(generate("a", [1]))
        await eventually(lambda: running.engine.load.running == 1)
        client.send(generate("b", [1]), generate("c", [1]))
        fail = await client.ended("c")
        assert isinstance(fail, Fail)
        assert fail.kind == "overloaded"
        running.runner.resume()
        await client.ended("b")


async def test_shutting_down_hands_requests_back_before_the_stream_closes() -> None:
    store = MemoryStore()
    async with running_worker(ScriptedRunner(step_delay_s=0.001), store=store) as running:
        incarnation, namespace = running.record.incarnation, running.record.namespace
        host, _, port = running.address.rpartition(":")
        client = StreamClient(*await asyncio.open_connection(host, int(port)))
        await client.hello(namespace)
        client.send(generate("a", PROMPT, max_tokens=3_000))
        await eventually(lambda: running.runner.num_steps > 3)
    fail = await client.ended("a")
    assert isinstance(fail, Fail)
    assert fail.kind == "draining"
    await client.closed()
    await client.close()
    assert not store.index(namespace).is_live(incarnation)
    assert not await store.registry().live_workers()
    assert not running.engine.is_serving


# --- beats ------------------------------------------------------------------------------------------------


async def test_beats_come_by_themselves_and_count_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server.BEAT_INTERVAL_S", 0.01)
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        beat = await client.beat()
        assert (beat.incarnation, beat.running, beat.waiting) == (running.record.incarnation, 0, 0)
        client.send(generate("a", PROMPT))
        await client.ended("a")
        assert (await client.beat()).step == running.runner.num_steps


async def test_a_beat_comes_at_once_when_no_first_token_is_owed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server.BEAT_INTERVAL_S", 1_000.0)
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        running.runner.pause()
        client.send(generate("a", [1]))
        await eventually(lambda: running.engine.load.running == 1)
        client.send(generate("b", [2]))
        await eventually(lambda: running.engine.load.waiting == 1)
        running.runner.resume()
        beat = await client.beat()
        assert (beat.waiting, beat.prefilling) == (0, 0)


async def test_no_beat_says_that_it_is_idle_while_a_long_prompt_is_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server.BEAT_INTERVAL_S", 1_000.0)
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        client.send(generate("a", [3] * 2_000, max_tokens=20))
        beat = await client.beat()
        assert (beat.running, beat.waiting, beat.prefilling) == (1, 0, 0)
        assert beat.step >= 4, "2,000 tokens are four steps"


# --- HTTP on the same port --------------------------------------------------------------------------------


async def test_http_and_streams_share_the_port() -> None:
    files = {"tokenizer.json": b'{"a": 1}', "chat_template.jinja": "ö".encode()}
    tokenizer = PlainTokenizer(files=files, fingerprint="abc")
    async with (
        running_worker(tokenizer=tokenizer) as running,
        connected(running.address, namespace=running.record.namespace) as client,
        aiohttp.ClientSession(f"http://{running.address}") as http,
    ):
        client.send(generate("a", PROMPT))
        await client.ended("a")
        async with http.get("/health") as response:
            assert response.status == 200
            assert (await response.json())["serving"] is True
        async with http.get("/tokenizer/manifest") as response:
            sizes = {"tokenizer.json": 8, "chat_template.jinja": 2}
            assert await response.json() == {"fingerprint": "abc", "files": sizes}
        for name, content in files.items():
            async with http.get(f"/tokenizer/files/{name}") as response:
                assert await response.read() == content
        for path in ("/tokenizer/files/other.json", "/tokenizer/files/..%2Fsecret", "/v1/models"):
            async with http.get(path) as response:
                assert response.status == 404
        async with http.get("/metrics") as response:
            text = await response.text()
            assert response.headers["Content-Type"].startswith("text/plain")
            assert 'prefixcache_worker_requests_total{reason="length"} 1.0' in text
            assert "prefixcache_worker_prompt_tokens_total 40.0" in text


async def test_health_says_when_the_engine_has_ended() -> None:
    async with running_worker() as running, aiohttp.ClientSession(f"http://{running.address}") as http:
        await asyncio.to_thread(running.engine.stop)
        async with http.get("/health") as response:
            assert response.status == 503


async def test_a_failed_engine_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(Exception, match="counted"):
        async with (
            running_worker() as running,
            connected(running.address, namespace=running.record.namespace) as client,
        ):
            running.engine._pool._num_idle += 1
            client.send(generate("a", PROMPT))
            fail = await client.ended("a")
            assert isinstance(fail, Fail)
            assert fail.kind == "worker_fault"
            await asyncio.wait_for(running.worker.failed.wait(), 5)


async def test_an_address_that_cannot_be_had_is_a_plain_error() -> None:
    async with running_worker() as running:
        host, _, port = running.address.rpartition(":")
        with pytest.raises(ConfigError, match=f"cannot listen on {running.address}: "):
            bind(Address(host=host, port=int(port)))
    with pytest.raises(ConfigError, match="cannot listen on 192"):
        bind(Address(host="192.0.2.1", port=0))


@pytest.mark.parametrize(
    "scenario",
    [
        test_a_request_from_hello_to_end,
        test_frames_may_be_cut_anywhere,
        test_unknown_frames_and_fields_are_ignored,
        test_abort_is_answered_by_an_end,
        test_a_lost_connection_aborts_its_requests_only,
        test_shutting_down_hands_requests_back_before_the_stream_closes,
        test_http_and_streams_share_the_port,
    ],
)
def test_the_same_on_uvloop(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    """The program runs on uvloop, whose transports differ in detail from asyncio's."""
    uvloop.run(scenario())


async def test_health_answer_asks_the_engine_itself_while_nobody_else_does() -> None:
    async with running_worker() as running, aiohttp.ClientSession() as session:
        url = f"http://{running.address}/health/answer"
        async with session.get(url) as answer:
            assert (answer.status, await answer.json()) == (
                200,
                {"answers": True, "reason": "a token was given of late"},
            )
        assert running.runner.num_steps == 1
        async with session.get(url) as answer:
            assert answer.status == 200
        assert running.runner.num_steps == 1, "it has just been answered"
        await is_idle(running)
        running.engine.drain()
        async with session.get(url) as answer:
            assert (answer.status, (await answer.json())["answers"]) == (503, False)


async def test_health_answer_takes_the_tokens_of_others_for_an_answer() -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        client.send(generate("a", PROMPT))
        await client.ended("a")
        steps = running.runner.num_steps
        async with aiohttp.ClientSession() as session, session.get(f"http://{running.address}/health/answer") as answer:
            assert answer.status == 200
        assert running.runner.num_steps == steps


async def test_health_answer_tells_of_a_step_that_broke() -> None:
    runner = ScriptedRunner(step_fault=lambda _: RuntimeError("no memory"))
    async with running_worker(runner) as running, aiohttp.ClientSession() as session:
        async with session.get(f"http://{running.address}/health/answer") as answer:
            assert answer.status == 503
            assert "no memory" in (await answer.json())["reason"]
