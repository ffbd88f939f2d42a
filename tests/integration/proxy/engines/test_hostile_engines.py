"""Engines that write whatever they like, cut wherever they like and end however they like: the client gets their bytes.

A stream whose engine finished it arrives byte for byte and ends cleanly; any other one arrives as far as it came, with
an error event behind it where one fits, and never ends cleanly; one that had not begun is an error with its status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import pytest

from prefixcache.limits import RELAY_BACKLOG_BYTES
from tests.support.answer_bytes import LAST_CHUNK, chat_events, chunk, chunked, head, stream_head
from tests.support.engine_proxy import chat, engine_answers, engine_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_engine import ReceivedRequest, Step, close, pieces, reset
from tests.support.seeds import seeded

NUM_SCRIPTS = 300
LARGE_BYTES = 600_000
SSE = ("content-type", "text/event-stream")
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
ENDS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/messages": 'event: message_stop\ndata: {"type": "message_stop"}',
    "/v1/responses": 'event: response.completed\ndata: {"type":"response.completed","response":{"usage":null}}',
}
PATHS = (*ENDS, "/v1/audio/speech")
TEXTS = (
    "a",
    "Grüße",
    "世界",
    "🙂🙃👩‍🚀",
    "\\n\\ndata: [DONE]\\n\\n",
    "usage",
    '\\"usage\\": null',
    "\\r\\n",
    "\\u0000",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One event as the engine writes it, and what of it the client gets."""

    engine: bytes
    client: bytes

    @classmethod
    def same(cls, data: bytes) -> Written:
        return cls(engine=data, client=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One script, and what has to come of it."""

    path: str
    is_asked_by_client: bool
    events: Sequence[Written]
    steps: Sequence[Step]
    num_body_bytes: int
    """Of the events, written before the end."""
    is_whole: bool
    """Whether the stream and its connection end in good order."""
    is_reset: bool
    """What was on its way may be lost."""

    @property
    def is_filtered(self) -> bool:
        return self.path in COMPLETIONS and not self.is_asked_by_client

    @property
    def body(self) -> bytes:
        return b"".join(event.engine for event in self.events)


def _event(random: Random, lines: Sequence[str]) -> bytes:
    end = random.choice(("\n", "\r\n", "\r"))
    return (end.join(lines) + 2 * end).encode()


def _written(random: Random, path: str, *, has_usage: bool) -> list[Written]:
    """Events of any shape, then the usage if it was asked for, then the end."""
    events = []
    for _ in range(random.randrange(12)):
        text = random.choice(TEXTS) * random.choice((1, 1, 3, 40))
        if random.random() < 0.01:
            text = "x" * LARGE_BYTES + text
        members = f'{{"choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]'
        kind = random.randrange(7)
        if kind < 2:
            events.append(Written.same(_event(random, [f"data: {members}}}"])))
        elif kind == 2 and has_usage:
            state = random.getstate()
            told = _event(random, [f'data: {members},"usage":null}}'])
            random.setstate(state)
            events.append(Written(engine=told, client=_event(random, [f"data: {members}}}"])))
        elif kind == 3:
            events.append(Written.same(_event(random, [": ping", f"data:{members}}}", "id: 7", "retry: 3", "data"])))
        elif kind == 4:
            events.append(
                Written.same(_event(random, ["event: x", f"data: {members},", 'data: "usage":', "data: no}"]))
            )
        elif kind == 5:
            events.append(Written.same(b"data: \xff\xfe" + random.randbytes(9).translate(None, b"\r\n") + b"\n\n"))
        else:
            events.append(Written.same(_event(random, [random.choice((": ping", ":", "unknown", "data: {"))])))
    if has_usage:
        told = _event(random, ['data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}'])
        events.append(Written(engine=told, client=b""))
    if path in ENDS:
        events.append(Written.same(_event(random, ENDS[path].split("\n"))))
    elif not events:
        events.append(Written.same(b"data: x\n\n"))
    return events


def _framed(random: Random, body: bytes) -> tuple[bytes, list[tuple[bytes, bool]], bool]:
    """Head, what follows in parts with whether they are body, and whether the length tells where it ends."""
    framing = random.choice(("chunked", "chunked", "until close", "length"))
    if framing == "until close":
        return head(200, SSE, ("connection", "close")), [(body, True)], False
    if framing == "length":
        return head(200, SSE, ("content-length", str(len(body)))), [(body, True)], True
    places = sorted(random.randrange(len(body) + 1) for _ in range(random.randrange(8)))
    parts: list[tuple[bytes, bool]] = []
    for begin, end in zip([0, *places], [*places, len(body)], strict=True):
        if begin < end:
            extension = random.choice((b"", b";a=b"))
            parts += [(b"%x%b\r\n" % (end - begin, extension), False), (body[begin:end], True), (b"\r\n", False)]
    return stream_head(), [*parts, (LAST_CHUNK, False)], True


def _play(random: Random) -> Play:
    path = random.choice(PATHS)
    is_asked = random.random() < 0.5
    events = _written(random, path, has_usage=path in COMPLETIONS and not is_asked)
    how = random.choice(("whole", "whole", "no end", "cut", "cut", "reset", "garbage"))
    if how == "no end" and path in ENDS:
        events = events[:-1]
    body = b"".join(event.engine for event in events)
    begin, parts, is_bounded = _framed(random, body)
    framed = b"".join(part for part, _ in parts)
    num_written = len(framed) if how in ("whole", "no end") else random.randrange(len(framed) + 1)
    is_chunked = parts[-1][0] == LAST_CHUNK
    if how == "garbage" and is_chunked:
        ends = list(accumulate(len(part) for part, _ in parts))
        num_written = random.choice([0, *(end for end, (part, _) in zip(ends, parts, strict=True) if part == b"\r\n")])
    num_body_bytes = place = 0
    for part, is_body in parts:
        num_body_bytes += min(len(part), max(num_written - place, 0)) * is_body
        place += len(part)
    written = framed[:num_written]
    ending: list[Step] = [reset()] if how == "reset" else [close()]
    is_whole = num_written == len(framed) and (how != "no end" or path not in ENDS)
    if how == "garbage" and is_chunked:
        ending.insert(0, b"\xffgarbage\r\n")
    if not is_bounded and path not in ENDS:
        # Nobody can know that there should have been more.
        is_whole = how != "reset"
    if not is_bounded and path in ENDS and how != "no end":
        # Line ends that are missing behind the last event change nothing.
        is_last_told = path in COMPLETIONS or body[:num_body_bytes].endswith((b"\r", b"\n"))
        is_whole = is_last_told and not body[num_body_bytes:].strip(b"\r\n")
    if how == "reset":
        is_whole = is_bounded and num_written == len(framed)
    cuts = random.sample(range(1, max(len(begin + written), 2)), min(random.randrange(30), len(begin + written) - 1))
    return Play(
        path=path,
        is_asked_by_client=is_asked,
        events=events,
        steps=[pieces(begin + written, at=cuts), *ending],
        num_body_bytes=num_body_bytes,
        is_whole=is_whole,
        is_reset=how == "reset",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """What a client saw."""

    status: int
    body: bytes
    ended_cleanly: bool


async def _ask(port: int, play: Play) -> Got:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if play.is_asked_by_client else {}
    async with raw_connection(port) as client:
        client.send(post(play.path, chat(stream=True, **options)))
        status, headers = await client.head()
        if "content-length" in headers:
            length = int(headers["content-length"])
            body = await client.reader.read(length) if length == 0 else b""
            while len(body) < length and (data := await client.reader.read(length - len(body))):
                body += data
            return Got(status=status, body=body, ended_cleanly=len(body) == length)
        body = b""
        try:
            while data := await client.chunk():
                body += data
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            assert not getattr(error, "partial", b""), "a chunk is written whole or not at all"
            return Got(status=status, body=body, ended_cleanly=False)
        return Got(status=status, body=body, ended_cleanly=True)


def _check(play: Play, got: Got) -> None:
    if got.status != 200:
        assert got.status == 502 and not play.is_whole
        assert json.loads(got.body)["error"]["code"] == "engine_fault"
        begun = play.body[: play.num_body_bytes]
        assert play.is_reset or all(line.startswith(b":") for line in begun.splitlines() if line), "it had not begun"
        return
    for_client = b"".join(event.client for event in play.events)
    assert got.ended_cleanly == play.is_whole
    if play.is_whole:
        missing = play.body[play.num_body_bytes :]
        assert got.body + missing == (for_client if play.path in ENDS else play.body)
        return
    told, behind = _without_error(got.body)
    assert for_client.startswith(told) or play.body.startswith(told)
    if play.is_reset:
        return
    if not play.is_filtered:
        assert told == play.body[: play.num_body_bytes]
        return
    arrived = place = 0
    least = b""
    for event in play.events:
        arrived += len(event.engine)
        if arrived > play.num_body_bytes:
            break
        least += event.client
        place = len(least)
    assert told[:place] == least and behind, "every whole event, no half one, and the error"


def _without_error(body: bytes) -> tuple[bytes, bool]:
    """What came of the engine, and whether an error event of the proxy stands behind it."""
    for begin in (b'data: {"error":{"message":', b'event: error\ndata: {"type":"error"'):
        at = body.rfind(begin)
        if at >= 0 and body.endswith(b"}\n\n"):
            data = body[body.index(b"{", at) : -2]
            assert "engine" in json.loads(data)["error"]["message"]
            return body[:at], True
    return body, False


async def test_the_client_gets_the_engines_bytes_and_the_truth_about_their_end() -> None:
    random = seeded("hostile engines")
    playing: list[Play] = []

    def then(_: ReceivedRequest) -> Sequence[Step]:
        return playing[-1].steps

    num_whole = 0
    async with engine_proxy(engine_answers(then=then)) as fleet:
        for number in range(NUM_SCRIPTS):
            playing.append(_play(random))
            got = await _ask(fleet.proxy.port, playing[-1])
            try:
                _check(playing[-1], got)
            except AssertionError as error:
                play = playing[-1]
                raise AssertionError(
                    f"script {number}: {play.path}, asked {play.is_asked_by_client}, whole {play.is_whole}, "
                    f"body {play.body[: play.num_body_bytes]!r:.3000}\ngot {got.status} {got.ended_cleanly} "
                    f"{got.body!r:.3000}"
                ) from error
            num_whole += playing[-1].is_whole
        (link,) = fleet.fleet.links
        assert link.ledger.is_idle and link.held.num_in_hand == 0
        assert link.pool.num_connections <= 2, "no connection of a broken answer is kept"
    assert NUM_SCRIPTS / 5 < num_whole < NUM_SCRIPTS * 4 / 5


@pytest.mark.parametrize("path", PATHS)
async def test_comments_without_end_before_the_first_event(path: str) -> None:
    """More of them than is held back: the stream begins with them, and nothing hangs."""
    comments = b": ping\n\n" * (RELAY_BACKLOG_BYTES // 8 + 1_000)
    end = ENDS.get(path, "data: x").encode() + b"\n\n"
    async with engine_proxy() as fleet:
        fleet.engines[0].script(stream_head(), chunk(comments), chunk(comments), chunked([end]))
        answer = await fleet.client.post(path, json=chat(stream=True))
        assert answer.content == 2 * comments + end


async def test_an_event_behind_a_comment_in_one_piece_is_passed_on_at_once() -> None:
    first, *rest = chat_events(["a"])
    go = asyncio.Event()

    async def wait(_: object) -> None:
        await go.wait()

    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        fleet.engines[0].script(stream_head(), chunk(b": ping\n\n" + first), wait, chunked(rest))
        client.send(post("/v1/chat/completions", chat(stream=True)))
        assert (await client.head())[0] == 200
        assert await client.chunk() == b": ping\n\n" + first
        go.set()
        assert b"".join(await client.chunks()) == b"".join(rest)


@pytest.mark.parametrize("path", ENDS)
async def test_a_stream_without_a_length_that_is_cut_is_not_taken_for_whole(path: str) -> None:
    """As of engines that speak HTTP/1.0: the end of the connection is all that they say."""
    async with engine_proxy() as fleet:
        for end, is_whole in ((ENDS[path].encode() + b"\n\n", True), (b"", False)):
            body = b'data: {"choices":[]}\n\n' + end
            fleet.engines[0].script(head(200, SSE, version="1.0"), body, close())
            async with raw_connection(fleet.proxy.port) as client:
                client.send(post(path, chat(stream=True)))
                assert (await client.head())[0] == 200
                got = await client.read_to(b"0\r\n\r\n") if is_whole else await client.read_all()
                assert body in got.replace(b"\r\n", b"\n") or is_whole
                assert got.endswith(b"\r\n0\r\n\r\n") == is_whole
                assert (b'"error"' in got) != is_whole
