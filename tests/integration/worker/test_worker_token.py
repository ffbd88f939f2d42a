"""A worker with a token serves nobody who has not proven that he knows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from prefixcache import limits
from prefixcache.protocol import Abort, Beat, End, Hello, Prove, encode
from prefixcache.worker_token import NONCE_BYTES, Exchange, new_nonce
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner, expected_output
from tests.support.seeds import seeded
from tests.support.stream_client import StreamClient, connected
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker
from worker import stream

TOKEN = b"the-token-of-this-test"
OTHER = b"another-token-of-that-test"
PROMPT = list(range(40))
MEND = "set the same PREFIXCACHE_WORKER_TOKEN on every proxy and worker"


async def exchanged(client: StreamClient, running: RunningWorker, token: bytes = TOKEN) -> Exchange:
    return await client.exchange(running.record.namespace, token, running.record.address)


async def is_refused(client: StreamClient, running: RunningWorker) -> None:
    """Closed by the worker, which has taken no request of it."""
    await client.closed()
    assert all(isinstance(frame, Hello) for frame in client.received), client.received
    assert running.runner.num_steps == 0 and running.engine.load.waiting == 0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "worker.stream" and record.levelno >= 30]


async def test_who_proves_the_token_is_served() -> None:
    async with running_worker(worker_token=TOKEN) as running:
        namespace = running.record.namespace
        async with connected(running.address, namespace=namespace, token=TOKEN) as client:
            client.send(generate("a", PROMPT))
            assert isinstance(await client.ended("a"), End)
            assert client.tokens("a") == expected_output(PROMPT, 4, vocab_size=1_000)
            assert (await client.beat()).incarnation == running.record.incarnation


async def test_proof_and_requests_may_be_cut_anywhere() -> None:
    random = seeded("cuts of a proof")
    async with running_worker(worker_token=TOKEN) as running:
        for _ in range(5):
            async with connected(running.address) as client:
                exchange = await exchanged(client, running)
                data = encode(Prove(proof=exchange.proof("proxy"))) + encode(generate("a", PROMPT))
                await client.send_cut(data, sorted(random.randrange(1, len(data)) for _ in range(random.randrange(9))))
                assert isinstance(await client.ended("a"), End)


async def test_a_request_before_the_proof_closes_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker(worker_token=TOKEN) as running:
        for frame in (generate("a", PROMPT), Abort(id="a")):
            async with connected(running.address) as client:
                exchange = await exchanged(client, running)
                client.send(frame, Prove(proof=exchange.proof("proxy")), generate("b", PROMPT))
                await is_refused(client, running)
        assert [line.split("closed: ")[1] for line in warnings(caplog)] == [
            "Generate frame before proof of the worker token",
            "Abort frame before proof of the worker token",
        ]
        assert all("127.0.0.1" in line for line in warnings(caplog))


async def test_a_stream_without_its_proof_gets_no_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.server.BEAT_INTERVAL_S", 0.01)
    async with (
        running_worker(worker_token=TOKEN) as running,
        connected(running.address) as client,
        connected(running.address, namespace=running.record.namespace, token=TOKEN) as proven,
    ):
        exchange = await exchanged(client, running)
        for _ in range(5):
            await proven.beat()
        client.send(Prove(proof=exchange.proof("proxy")))
        await client.beat()
        beats = [frame for frame in client.received if isinstance(frame, Beat)]
        assert len(beats) <= 2, "those since the proof"


EARLIER = Exchange(
    token=TOKEN, namespace="0" * 16, address="127.0.0.1:1", proxy_nonce=new_nonce(), worker_nonce=new_nonce()
)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda _exchange: b"",
        lambda exchange: exchange.proof("proxy")[:-1],
        lambda exchange: exchange.proof("proxy") + b"\0",
        lambda exchange: exchange.proof("worker"),
        lambda exchange: replace(exchange, token=OTHER).proof("proxy"),
        lambda exchange: replace(EARLIER, namespace=exchange.namespace, address=exchange.address).proof("proxy"),
    ],
    ids=["empty", "cut", "long", "reflected", "of another token", "of another stream"],
)
async def test_a_wrong_proof_closes_the_stream(
    wrong: Callable[[Exchange], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(worker_token=TOKEN) as running, connected(running.address) as client:
        exchange = await exchanged(client, running)
        client.send(Prove(proof=wrong(exchange)), generate("a", PROMPT))
        await is_refused(client, running)
        (line,) = warnings(caplog)
        assert f"the proxy has another worker token: {MEND}" in line
        for unsaid in (TOKEN, wrong(exchange) or TOKEN, exchange.proof("proxy"), exchange.proof("worker")):
            assert unsaid.hex() not in caplog.text and repr(unsaid)[2:-1] not in caplog.text


@pytest.mark.parametrize("hello", [{}, {"minor": 1}, {"nonce": b""}, {"nonce": b"short"}, {"nonce": bytes(17)}])
async def test_a_proxy_without_a_token_is_told_what_is_missing(
    hello: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(worker_token=TOKEN) as running, connected(running.address) as client:
        body = msgspec.msgpack.encode({"type": "hello", "namespace": running.record.namespace, **hello})
        client.send_bytes(len(body).to_bytes(4, "big") + body)
        client.send(generate("a", PROMPT))
        await is_refused(client, running)
        (answer,) = client.received
        assert isinstance(answer, Hello) and len(answer.nonce) == NONCE_BYTES
        (line,) = warnings(caplog)
        told = "a nonce of" if hello.get("nonce") else f"the proxy has no worker token and this worker has one: {MEND}"
        assert told in line


async def test_a_worker_without_a_token_refuses_who_asks_for_its_proof(caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker() as running, connected(running.address) as client:
        hello = await client.hello(running.record.namespace, new_nonce())
        assert (hello.nonce, hello.proof) == (b"", b"")
        client.send(generate("a", PROMPT))
        await is_refused(client, running)
        (line,) = warnings(caplog)
        assert f"the proxy has a worker token and this worker has none: {MEND}" in line


async def test_a_proxy_of_version_1_0_is_served_where_there_is_no_token() -> None:
    async with running_worker() as running, connected(running.address) as client:
        client.send(Hello(namespace=running.record.namespace), generate("a", PROMPT))
        assert isinstance(await client.ended("a"), End)
        hello = client.received[0]
        assert isinstance(hello, Hello) and (hello.nonce, hello.proof) == (b"", b"")


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_a_proof_that_was_not_asked_for_closes_the_stream(
    token: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_worker(worker_token=token) as running,
        connected(running.address, namespace=running.record.namespace, token=token) as client,
    ):
        client.send(Prove(proof=b"x" * 32), generate("a", PROMPT))
        await is_refused(client, running)
        assert "a proof that was not asked for" in caplog.text


async def test_a_second_hello_does_not_begin_the_exchange_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker(worker_token=TOKEN) as running, connected(running.address) as client:
        exchange = await exchanged(client, running)
        client.send(Hello(namespace=running.record.namespace, nonce=exchange.proxy_nonce))
        await is_refused(client, running)
        assert len(client.received) == 1 and "a second hello" in caplog.text


async def test_leaving_or_waiting_instead_of_proving_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(worker_token=TOKEN) as running:
        async with connected(running.address) as client:
            await exchanged(client, running)
        await eventually(lambda: warnings(caplog))
        (line,) = warnings(caplog)
        assert "127.0.0.1" in line and f"ended before its proof of the worker token: {MEND}" in line
        monkeypatch.setattr(stream, "HELLO_TIMEOUT_S", 0.05)
        async with connected(running.address) as client:
            await exchanged(client, running)
            await is_refused(client, running)
        assert "no proof of the worker token within 0.05 s" in warnings(caplog)[1]
        assert len(warnings(caplog)) == 2


async def test_bytes_before_the_proof_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker(worker_token=TOKEN) as running, connected(running.address) as client:
        await exchanged(client, running)
        client.send_bytes(b"\x00\x10\x00\x00" + bytes(limits.MAX_HELLO_BYTES))
        await is_refused(client, running)
        assert "no proof of the worker token within the first" in caplog.text


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_any_beginning_is_refused_or_waited_for_and_disturbs_nobody(token: bytes | None) -> None:
    random = seeded("hellos")
    async with running_worker(ScriptedRunner(), worker_token=token) as running:
        namespace = running.record.namespace
        values: list[object] = [None, 0, 1, -1, 2**63, "", namespace, b"", bytes(16), b"x" * 32, [], {}, True, 1.5]
        names = ["type", "major", "minor", "namespace", "incarnation", "nonce", "proof", "id", "later"]
        async with connected(running.address, namespace=namespace, token=token) as sound:
            for attempt in range(120):
                content: dict[str, object] = {"type": "hello", "namespace": namespace, "nonce": new_nonce()}
                for name in random.sample(names, random.randrange(1, 4)):
                    content[name] = random.choice(values)
                body = bytearray(msgspec.msgpack.encode(content))
                if random.random() < 0.3:
                    body[random.randrange(len(body))] = random.randrange(256)
                async with connected(running.address) as client:
                    client.send_bytes(len(body).to_bytes(4, "big") + body)
                    proof = random.choice([b"", bytes(32), random.randbytes(32)])
                    client.send(Prove(proof=proof), generate(f"fuzz{attempt}", [7]))
                    if token is not None:
                        await is_refused(client, running)
            sound.send(generate("sound", PROMPT))
            assert isinstance(await sound.ended("sound"), End)
