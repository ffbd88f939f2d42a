"""The queue of one connection: one write a turn, replies in order, deadlines from the write."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import hiredis
import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.index import hot_connection
from prefixcache.index.breaker import Breaker
from prefixcache.index.hot_connection import HotConnection
from tests.support.recording_transport import RecordingTransport
from tests.support.seeds import seeded
from tests.support.waiting import eventually

DEADLINE_S = 0.03


class CountingTransport(RecordingTransport):
    """Keeps each write by itself."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__(protocol)
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        self.writes.append(bytes(data))


class Peer:
    """A connection, past its handshake if it has a deadline, and what a server does to it."""

    def __init__(self, deadline_s: float | None = DEADLINE_S) -> None:
        self.breaker = Breaker()
        self.num_changes = 0
        self.connection = HotConnection("here", changed=self._changed)
        self.transport = CountingTransport(self.connection)
        self.connection.connection_made(self.transport)
        if deadline_s is not None:
            self.connection.serve(self.breaker, deadline_s)

    def call(self, *words: bytes | str | int) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.connection.send(future, *words)
        return future

    def reply(self, *numbers: int) -> None:
        self.connection.data_received(b"".join(b":%d\r\n" % number for number in numbers))

    def _changed(self) -> None:
        self.num_changes += 1


async def turn() -> None:
    await asyncio.sleep(0)


async def test_calls_of_one_turn_are_one_write() -> None:
    peer = Peer()
    calls = [peer.call("ECHO", number) for number in range(3)]
    assert peer.transport.writes == []
    await turn()
    assert peer.transport.writes == [b"".join(b"*2\r\n$4\r\nECHO\r\n$1\r\n%d\r\n" % number for number in range(3))]
    calls.append(peer.call("ECHO", b"\xff"))
    await turn()
    assert peer.transport.writes[1:] == [b"*2\r\n$4\r\nECHO\r\n$1\r\n\xff\r\n"]
    peer.reply(10, 11, 12, 13)
    assert await asyncio.gather(*calls) == [10, 11, 12, 13]


async def test_reply_of_any_kind_in_any_pieces() -> None:
    replies = b"$-1\r\n" + b"*2\r\n:0\r\n*-1\r\n" + b"$3\r\na\r\n\r\n" + b"-ERR no\r\n" + b"+OK\r\n" + b"$0\r\n\r\n"
    peer = Peer()
    calls = [peer.call("PING") for _ in range(6)]
    await turn()
    for at in range(len(replies)):
        peer.connection.data_received(replies[at : at + 1])
    nothing, pair, text, error, ok, empty = await asyncio.gather(*calls)
    assert (nothing, pair, text, ok, empty) == (None, [0, None], b"a\r\n", b"OK", b"")
    assert isinstance(error, hiredis.ReplyError) and str(error) == "ERR no"


async def test_expired_call_fails_at_its_deadline_and_its_late_reply_is_dropped() -> None:
    peer = Peer()
    first = peer.call("PING")
    await turn()
    written_at = time.monotonic()
    with pytest.raises(IndexUnavailable, match="here gave no answer within 30 ms"):
        await first
    assert time.monotonic() - written_at >= DEADLINE_S - 0.001
    assert (peer.breaker.state, peer.breaker.num_owed, peer.num_changes) == ("owing", 1, 1)
    second = peer.call("PING")
    await turn()
    peer.reply(1)
    assert (peer.breaker.state, peer.num_changes) == ("closed", 2)
    assert not second.done()
    peer.reply(2)
    assert await second == 2


@pytest.mark.parametrize("is_paid", [False, True])
async def test_deadline_of_a_call_behind_an_overdue_reply_holds_too(is_paid: bool) -> None:
    peer = Peer()
    peer.call("PING")
    await eventually(lambda: peer.breaker.num_owed == 1)
    if is_paid:
        peer.reply(1)
    call = peer.call("PING")
    await asyncio.wait([call], timeout=10 * DEADLINE_S)
    with pytest.raises(IndexUnavailable, match="30 ms"):
        call.result()


async def test_deadline_counts_from_the_write() -> None:
    peer = Peer()
    call = peer.call("PING")
    time.sleep(2 * DEADLINE_S)  # noqa: ASYNC251  # the turn in which the call was made takes long
    await turn()
    await asyncio.sleep(DEADLINE_S / 3)
    assert not call.done()
    peer.reply(1)
    assert await call == 1


async def test_deadline_holds_from_the_first_call_after_the_handshake() -> None:
    peer = Peer(deadline_s=None)
    greeting = peer.call("PING")
    await turn()
    peer.reply(1)
    assert await greeting == 1
    peer.connection.serve(peer.breaker, DEADLINE_S)
    call = peer.call("PING")
    await asyncio.wait([call], timeout=10 * DEADLINE_S)
    with pytest.raises(IndexUnavailable, match="30 ms"):
        call.result()


async def test_timer_serves_calls_of_different_turns_each_at_its_own_time() -> None:
    peer = Peer()
    ended: list[tuple[int, float]] = []

    def note(number: int, _call: asyncio.Future[Any]) -> None:
        ended.append((number, time.monotonic()))

    written_at: list[float] = []
    for number in range(3):
        call = peer.call("PING")
        call.add_done_callback(partial(note, number))
        await turn()
        written_at.append(time.monotonic())
        await asyncio.sleep(DEADLINE_S / 4)
    await eventually(lambda: len(ended) == 3)
    assert [number for number, _ in ended] == [0, 1, 2]
    assert all(at >= written + DEADLINE_S - 0.001 for (_, at), written in zip(ended, written_at, strict=True))
    assert peer.breaker.num_owed == 3
    peer.reply(1, 2, 3)
    assert peer.breaker.num_owed == 0


async def test_cancelled_call_keeps_its_place() -> None:
    peer = Peer()
    before, after = peer.call("PING"), peer.call("PING")
    before.cancel()
    await turn()
    peer.reply(1)
    assert not after.done()
    peer.reply(2)
    assert await after == 2


async def test_cancelled_call_without_a_reply_is_owed_one_too() -> None:
    peer = Peer()
    peer.call("PING").cancel()
    await eventually(lambda: peer.breaker.num_owed == 1)


async def test_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_connection, "INDEX_MOST_CALLS", 3)
    peer = Peer()
    peer.call("PING")
    await turn()
    await eventually(lambda: peer.breaker.num_owed == 1)
    waiting = peer.call("PING")
    await turn()
    unsent = peer.call("PING")
    with pytest.raises(IndexUnavailable, match="3 calls to Redis at here wait"):
        peer.call("PING")
    await turn()
    peer.reply(1)
    more = peer.call("PING")
    await turn()
    peer.reply(2, 3, 4)
    assert [await call for call in (waiting, unsent, more)] == [2, 3, 4]


async def test_connection_that_owes_a_reply_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_connection, "INDEX_DEAD_CONNECTION_S", 3 * DEADLINE_S)
    peer = Peer()
    peer.call("PING").cancel()
    await turn()
    written_at = time.monotonic()
    reason = await asyncio.wait_for(asyncio.shield(peer.connection.lost), timeout=5.0)
    assert time.monotonic() - written_at >= 3 * DEADLINE_S - 0.001
    assert "gave no answer" in str(reason)
    assert peer.breaker.num_owed == 0
    with pytest.raises(IndexUnavailable, match="gave no answer"):
        peer.call("PING")


async def test_paid_in_time_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_connection, "INDEX_DEAD_CONNECTION_S", 2 * DEADLINE_S)
    peer = Peer()
    for number in range(3):
        peer.call("PING").cancel()
        await eventually(lambda: peer.breaker.num_owed == 1)
        peer.reply(number)
    await asyncio.sleep(2 * DEADLINE_S)  # as long as it took to cut one
    assert peer.connection.is_open


async def test_lost_connection_fails_all_calls_sent_or_not() -> None:
    peer = Peer()
    sent = peer.call("PING")
    await turn()
    unsent = peer.call("PING")
    peer.connection.connection_lost(ConnectionResetError("reset"))
    for call in (sent, unsent):
        with pytest.raises(IndexUnavailable, match="here failed: reset"):
            await call
    assert "reset" in str(await peer.connection.lost)
    await turn()
    assert len(peer.transport.writes) == 1


@pytest.mark.parametrize("rubbish", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*-5\r\n", b":1\r\n:2\r\n"])
async def test_peer_that_breaks_the_protocol_is_cut(rubbish: bytes) -> None:
    """The last one is a reply to nothing."""
    peer = Peer()
    call = peer.call("PING")
    await turn()
    peer.connection.data_received(rubbish)
    assert peer.connection.lost.done() and not peer.connection.is_open
    await asyncio.wait([call])
    if rubbish.startswith(b":"):
        assert await call == 1
    else:
        with pytest.raises(IndexUnavailable, match="protocol"):
            await call


async def test_command_that_cannot_be_packed_leaves_no_place_behind() -> None:
    peer = Peer()
    with pytest.raises(TypeError):
        peer.call("ECHO", None)  # type: ignore[arg-type]  # the mistake under test
    call = peer.call("PING")
    await turn()
    peer.reply(1)
    assert await call == 1


async def test_every_reply_reaches_its_own_call_whatever_happens_to_the_others() -> None:
    """Calls, cancellations, expiries and replies in random order and pieces; replies name their calls."""
    rand = seeded("interleavings")
    for _ in range(200):
        peer = Peer(deadline_s=0.002)
        calls: list[asyncio.Future[Any]] = []
        num_replied = 0
        pending = b""
        for _ in range(rand.randrange(5, 40)):
            match rand.randrange(5):
                case 0 | 1:
                    calls += [peer.call("ECHO", len(calls))]
                case 2:
                    num_sent = sum(write.count(b"ECHO") for write in peer.transport.writes)
                    upto = rand.randint(num_replied, num_sent)
                    pending += b"".join(b":%d\r\n" % number for number in range(num_replied, upto))
                    num_replied = upto
                    cut = rand.randint(0, len(pending))
                    peer.connection.data_received(pending[:cut])
                    pending = pending[cut:]
                case 3 if calls:
                    rand.choice(calls).cancel()
                case _:
                    await asyncio.sleep(rand.choice((0, 0, 0.001, 0.003)))
        await turn()
        peer.connection.data_received(pending)
        peer.reply(*range(num_replied, len(calls)))
        for number, call in enumerate(calls):
            assert call.done()
            if not call.cancelled() and call.exception() is None:
                assert call.result() == number
            elif not call.cancelled():
                assert isinstance(call.exception(), IndexUnavailable)
        assert peer.breaker.num_owed == 0 and peer.connection.is_open
