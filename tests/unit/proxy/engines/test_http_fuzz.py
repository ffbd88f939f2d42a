"""Broken and random answers: what comes of one does not depend on how it was cut, and never is an exception."""

from __future__ import annotations

from random import Random

from prefixcache.errors import EngineFault
from tests.support.answer_bytes import chat_stream, chunked, head, whole
from tests.support.scripted_transport import ScriptedConnection
from tests.support.seeds import seeded

NUM_ANSWERS = 1_500
MOST_CUTS = 12
GOOD = (
    whole(b"hello", ("X-A", "b")),
    head(200, ("Transfer-Encoding", "chunked")) + chunked([b"hel", b"lo"], extension=b";a=b", trailers=b"T: 1\r\n"),
    head(103, ("Link", "a")) + whole(b"hello", ("Connection", "close"), status=404),
    head(200) + b"until close",
    head(204) + whole(b"more"),
    chat_stream(["a", "ä"]),
)
PIECES = (
    b"\r\n",
    b"\n",
    b"\r",
    b"0",
    b"f",
    b": ",
    b" ",
    b"\0",
    b"HTTP/1.1 200 OK",
    b"chunked",
    b"\xff",
    b"-1",
    b"\r\n\r\n",
)


def _broken(random: Random) -> bytes:
    """One of the good ones with some bytes changed, left out, put in or repeated."""
    data = bytearray(random.choice(GOOD))
    for _ in range(random.randrange(4)):
        place = random.randrange(len(data))
        kind = random.randrange(4)
        if kind == 0:
            data[place] = random.randrange(256)
        elif kind == 1:
            del data[place : place + random.choice((1, 2, 10))]
        elif kind == 2:
            data[place:place] = random.choice(PIECES)
        else:
            data[place:place] = data[place : place + 20]
    return bytes(data)


def _outcome(parts: list[bytes], *, is_head: bool) -> tuple[object, ...]:
    """What the sink heard, and whether the connection went on."""
    with ScriptedConnection() as scripted:
        log = scripted.ask(is_head=is_head)
        scripted.receive(*parts)
        scripted.end()
        assert log.is_over and scripted.num_gone == 1
        assert log.error is None or isinstance(log.error, EngineFault)
        return log.status, log.reason, log.headers, log.body, log.error is None


async def test_an_outcome_does_not_depend_on_the_cuts() -> None:
    random = seeded("broken answers")
    num_failed = 0
    for _ in range(NUM_ANSWERS):
        data, is_head = _broken(random), random.random() < 0.1
        expected = _outcome([data], is_head=is_head)
        num_failed += not expected[-1]
        places = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(MOST_CUTS)))
        parts = [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]
        assert _outcome([part for part in parts if part], is_head=is_head) == expected, (data, places)
    assert NUM_ANSWERS / 10 < num_failed < NUM_ANSWERS * 9 / 10


async def test_random_bytes_never_are_an_answer() -> None:
    random = seeded("random bytes")
    for _ in range(NUM_ANSWERS // 3):
        data = random.randbytes(random.randrange(1, 200))
        assert _outcome([data], is_head=False)[-1] is False
