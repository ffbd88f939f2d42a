"""The hot connection is made again whenever it is lost, by every kind of URL, and never used in an unknown state."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixcache.errors import ConfigError, IndexUnavailable
from prefixcache.index import hot_client as hot_client_module
from prefixcache.index import scripts
from prefixcache.index.hot_client import HotClient
from prefixcache.limits import INDEX_CONNECT_TIMEOUT_S, INDEX_DEADLINE_S
from tests.support.certificates import self_signed
from tests.support.hot_calls import APPEND, ECHO, echo, echoes, hot_client, until_answered
from tests.support.own_server import OwnServer, binary_of
from tests.support.redis_relay import redis_relay
from tests.support.seeds import seeded
from tests.support.valkey import Server
from tests.support.waiting import eventually


@pytest.fixture(params=["valkey", "redis"])
async def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OwnServer]:
    binary = binary_of(request.param)
    if binary is None:
        pytest.skip(f"no {request.param} server on this machine")
    server = OwnServer(binary, tmp_path)
    await server.start()
    try:
        yield server
    finally:
        server.stop()


async def test_killed_server_fails_calls_at_once_and_is_found_again(own_server: OwnServer) -> None:
    async with hot_client(own_server.url) as client:
        await echo(client, 1)
        with own_server.paused():
            calls = [asyncio.ensure_future(echo(client, number)) for number in range(10)]
            await asyncio.sleep(0)
            own_server.kill()
        begun_at = time.perf_counter()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert time.perf_counter() - begun_at < 1.0
        assert all(isinstance(answer, IndexUnavailable) for answer in answers), answers
        await eventually(lambda: not client.is_available)
        for number in range(20):
            client.post(ECHO, "k", number)
            begun_at = time.perf_counter()
            with pytest.raises(IndexUnavailable, match=f"127.0.0.1:{own_server.port}"):
                await echo(client, number)
            assert time.perf_counter() - begun_at < INDEX_DEADLINE_S
        await own_server.start()
        await eventually(lambda: client.is_available)
        await echoes(client)


async def test_server_that_starts_later_is_found(own_server: OwnServer, caplog: pytest.LogCaptureFixture) -> None:
    own_server.kill()
    caplog.set_level(logging.INFO)
    async with hot_client(own_server.url) as client:
        with pytest.raises(IndexUnavailable, match="Errno 111"):
            await echo(client, 1)
        await own_server.start()
        await eventually(lambda: client.is_available)
        await echo(client, 1)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("prefixcache")]
    assert len(ours) == 2, "once that it is away, once that it is back, however many attempts there were"


async def test_frozen_server_is_not_piled_up_on(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other, each over in its time; what they leave behind does not answer anybody."""
    monkeypatch.setattr(hot_client_module, "INDEX_CONNECT_TIMEOUT_S", 0.1)
    async with hot_client(own_server.url, deadline_s=INDEX_DEADLINE_S) as client:
        await until_answered(client)
        with own_server.paused():
            with pytest.raises(IndexUnavailable):
                await echo(client, 2)
            begun_at = time.monotonic()
            await eventually(lambda: time.monotonic() - begun_at > 2.5)
            assert len(asyncio.all_tasks()) <= 2
            with pytest.raises(IndexUnavailable, match="100 ms"):
                await echo(client, 3)
        resumed_at = time.monotonic()
        await eventually(lambda: client.is_available)
        assert time.monotonic() - resumed_at < 2.5
        await until_answered(client)


async def test_opening_on_a_frozen_server_takes_its_second_and_goes_on(own_server: OwnServer) -> None:
    with own_server.paused():
        begun_at = time.monotonic()
        async with HotClient.open(own_server.url) as client:
            assert time.monotonic() - begun_at < INDEX_CONNECT_TIMEOUT_S + 0.5
            with pytest.raises(IndexUnavailable, match="1000 ms"):
                await echo(client, 1)


async def test_scripts_are_loaded_on_every_connection(any_server: Server) -> None:
    any_server.command("SCRIPT", "FLUSH")
    async with hot_client(any_server.url):
        loaded = [any_server.command("SCRIPT", "EXISTS", script.sha1) for script in scripts.ALL]
    assert set(loaded) == {b"*1\r\n:1\r\n"} and len(loaded) >= 8


async def test_connection_has_a_name(any_server: Server) -> None:
    async with hot_client(any_server.url):
        assert b"name=prefixcache " in any_server.command("CLIENT", "LIST")


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 14, 15])
async def test_reply_cut_in_the_middle_fails_its_call_and_no_other_gets_the_rest(
    any_server: Server, num_bytes: int
) -> None:
    """A reply of ECHO has 14 bytes."""
    async with redis_relay(any_server.url) as relay, hot_client(f"redis://127.0.0.1:{relay.port}") as client:
        await echo(client, 1)
        relay.cut_after_bytes = num_bytes
        answers = await asyncio.gather(*(echo(client, number) for number in range(3)), return_exceptions=True)
        num_answered = num_bytes // 14
        assert answers[:num_answered] == [None] * num_answered
        assert all(isinstance(answer, IndexUnavailable) for answer in answers[num_answered:]), answers
        await eventually(lambda: client.is_available)
        assert relay.num_accepted == 2
        await echoes(client)


async def test_replies_byte_by_byte(any_server: Server) -> None:
    async with redis_relay(any_server.url) as relay:
        relay.byte_by_byte = True
        async with hot_client(f"redis://127.0.0.1:{relay.port}") as client:
            await echoes(client)


async def test_connections_killed_under_load_mix_nothing_up(
    any_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_client_module, "RECONNECT_MOST_S", 0.05)
    rand = seeded("kills")
    async with hot_client(any_server.url) as client:
        num_answered = 0
        for start in range(0, 3_000, 100):
            calls = [asyncio.ensure_future(echo(client, start + number)) for number in range(100)]
            if rand.random() < 0.5:
                await asyncio.sleep(rand.uniform(0, 0.002))
                any_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert all(answer is None or isinstance(answer, IndexUnavailable) for answer in answers), answers
            num_answered += answers.count(None)
            await eventually(lambda: client.is_available)
        assert num_answered > 1_000


async def test_password_is_asked_for_in_plain_words_until_it_is_right(
    any_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    path = any_server.url.removeprefix("unix://")
    any_server.command("ACL", "SETUSER", "reader", "on", ">pass", "+@all", "-set", "-client", "-script|load", "~*")
    open_to_all = ("ACL", "SETUSER", "default", "on", "nopass", "+@all", "~*", "&*")
    any_server.command("ACL", "SETUSER", "default", "resetpass", ">word")
    try:
        for url in (f"unix://{path}", f"unix://:wrong@{path}", f"unix://reader:word@{path}", f"unix://{path}?db=1"):
            async with hot_client(url) as client:
                assert not client.is_available
                with pytest.raises(IndexUnavailable, match="asks for a password, or for another one") as caught:
                    await echo(client, 1)
            assert "wrong" not in str(caught.value) and "word@" not in str(caught.value)
        async with hot_client(f"unix://:word@{path}") as client:
            await echo(client, 1)
        async with hot_client(f"unix://reader:pass@{path}") as client:  # may neither name itself nor load scripts
            await echo(client, 1)
        async with hot_client(f"unix://:later@{path}") as client:
            with pytest.raises(IndexUnavailable, match="password"):
                await echo(client, 1)
            await as_admin(path, "word", ("ACL", "SETUSER", "default", ">later"))
            await eventually(lambda: client.is_available)
            await echo(client, 1)
    finally:
        await as_admin(path, "word", ("ACL", "DELUSER", "reader"), open_to_all)
    assert "wrong" not in caplog.text and "word@" not in caplog.text


async def as_admin(path: str, password: str, *commands: tuple[str, ...]) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    for words in (("AUTH", password), *commands):
        writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w.encode()) for w in words))
        assert (await reader.readline())[:1] in b"+:"
    writer.close()
    await writer.wait_closed()


async def test_database_number(any_server: Server) -> None:
    path = any_server.url.removeprefix("unix://")
    async with redis_relay(any_server.url) as relay:
        for url in (f"unix://{path}?db=3", f"redis://127.0.0.1:{relay.port}/3"):
            async with hot_client(url) as client:
                await client.run(APPEND, "list", 1)
    assert any_server.command("EXISTS", "list") == b":0\r\n"
    async with hot_client(f"{any_server.url}?db=3") as client:
        assert await client.run(APPEND, "list", 1) == 3
    async with hot_client(f"{any_server.url}?db=99") as client:
        with pytest.raises(IndexUnavailable, match="DB index is out of range"):
            await echo(client, 1)


async def test_unusable_url_is_refused() -> None:
    with pytest.raises(ConfigError):
        async with HotClient.open("http://127.0.0.1"):
            pass


async def test_peer_that_is_no_redis() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, hot_client(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(IndexUnavailable, match="protocol"):
            await echo(client, 1)


# --- TLS


def unavailable_reason(client: HotClient) -> str:
    try:
        client.send(asyncio.get_running_loop().create_future(), "PING")
    except IndexUnavailable as error:
        return str(error)
    return ""


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on PATH makes certificates")
    return self_signed(tmp_path)


async def check_tls(port: int, certificate: Path) -> None:
    async with hot_client(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}") as client:
        await echoes(client)
        large = seeded("bytes").randbytes(1_000_000)
        assert await client.run(ECHO, "k", large) == large
    async with hot_client(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none") as client:
        await echo(client, 1)
    async with hot_client(f"rediss://127.0.0.1:{port}") as client:
        with pytest.raises(IndexUnavailable, match="certificate"):
            await echo(client, 1)
    async with hot_client(f"redis://127.0.0.1:{port}") as client:
        with pytest.raises(IndexUnavailable):
            await echo(client, 1)


async def test_tls_before_any_server(any_server: Server, certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with redis_relay(any_server.url, tls=context) as relay:
        await check_tls(relay.port, certificate[0])


async def test_tls_of_the_server_itself(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """Debian's Redis has it; the embedded Valkey is built without."""
    binary = binary_of("redis")
    if binary is None:
        pytest.skip("no redis-server on PATH")
    path, key = certificate
    files = {"tls-cert-file": path, "tls-key-file": key, "tls-ca-cert-file": path}
    server = OwnServer(binary, tmp_path, tls=files | {"tls-auth-clients": Path("optional")})
    await server.start()
    try:
        await check_tls(server.port, path)
        client_files = f"ssl_certfile={path}&ssl_keyfile={key}"
        async with hot_client(f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={path}&{client_files}") as client:
            await echo(client, 1)
        async with HotClient.open(f"rediss://127.0.0.1:{server.port}?ssl_cert_reqs=none") as client:
            with server.paused():
                begun_at = time.monotonic()
                with pytest.raises(IndexUnavailable, match="30 ms"):
                    await echo(client, 1)
                await eventually(lambda: "1000 ms" in unavailable_reason(client))
                assert time.monotonic() - begun_at < 3.0
            await eventually(lambda: client.is_available)
            await until_answered(client)
    finally:
        server.stop()
