"""What a proxy's answer to GET /ready means."""

from __future__ import annotations

import pytest

from edge.address import Address
from edge.readiness import ask_ready, saying_of
from edge.roster import Saying, Word
from tests.support.ports import free_port
from tests.support.scripted_engine import Step, close, never, reset, scripted_engine


@pytest.mark.parametrize(
    ("head", "saying"),
    [
        (b"HTTP/1.1 200 OK", Saying(Word.READY)),
        (b"HTTP/1.0 503 Service Unavailable", Saying(Word.NOT_READY)),
        (b"HTTP/1.1 404 Not Found", Saying(Word.NOT_READY)),
        (b"", Saying(Word.REFUSED)),
        (b"SSH-2.0 200", Saying(Word.REFUSED)),
        (b"HTTP/1.1 200 OK\r\nServer: x\r\nX-Prefixcache-Proxy:  0a1b \r\nDate: y", Saying(Word.READY, "0a1b")),
        (b"HTTP/1.1 503 No\r\nx-prefixcache-proxy:ff", Saying(Word.NOT_READY, "ff")),
        (b"HTTP/1.1 200 OK\r\nx-prefixcache-proxy:\r\nno header", Saying(Word.READY)),
    ],
)
def test_words(head: bytes, saying: Saying) -> None:
    assert saying_of(head + b"\r\n\r\n") == saying


async def asked(*steps: Step, timeout_s: float = 5.0) -> Saying:
    async with scripted_engine() as proxy:
        proxy.script(*steps)
        saying = await ask_ready(Address("127.0.0.1", proxy.port), timeout_s=timeout_s)
        assert [request.target for request in proxy.requests] == ["/ready"]
        assert proxy.requests[0].head.startswith(b"GET /ready HTTP/1.0\r\n"), "an answer without chunks, and no more"
        return saying


async def test_an_answer_over_a_socket() -> None:
    assert await asked(b"HTTP/1.1 200 OK\r\n\r\n{}", close()) == Saying(Word.READY)
    unready = asked(b"HTTP/1.1 503 Service Una", b"vailable\r\nx-prefixcache-proxy: 0", b"a\r\n\r\n{}", close())
    assert await unready == Saying(Word.NOT_READY, "0a")


async def test_one_that_says_nothing_is_silent() -> None:
    assert await asked(never(), timeout_s=0.05) == Saying(Word.SILENT)
    assert await asked(b"HTTP/1.1 200 OK\r\n", never(), timeout_s=0.05) == Saying(Word.SILENT)


async def test_one_that_hangs_up_has_refused() -> None:
    assert await asked(close()) == Saying(Word.REFUSED)
    assert await asked(reset()) == Saying(Word.REFUSED)
    assert await asked(b"HTTP/1.1 200 OK\r\n", close()) == Saying(Word.REFUSED), "it died as it answered"
    assert await asked(b"HTTP/1.1 200 OK\r\nx: ", b"x" * (1 << 20), close()) == Saying(Word.REFUSED)
    assert await ask_ready(Address("127.0.0.1", free_port())) == Saying(Word.REFUSED)
