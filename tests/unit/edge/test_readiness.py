"""What a proxy's answer to GET /ready means."""

from __future__ import annotations

import pytest

from edge.address import Address
from edge.readiness import ask_ready, word_of
from edge.roster import Word
from tests.support.ports import free_port
from tests.support.scripted_engine import Step, close, never, reset, scripted_engine


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"HTTP/1.1 200 OK\r\n", Word.READY),
        (b"HTTP/1.0 503 Service Unavailable\r\n", Word.NOT_READY),
        (b"HTTP/1.1 404 Not Found\r\n", Word.NOT_READY),
        (b"", Word.REFUSED),
        (b"SSH-2.0 200\r\n", Word.REFUSED),
    ],
)
def test_words(line: bytes, word: Word) -> None:
    assert word_of(line) is word


async def asked(*steps: Step, timeout_s: float = 5.0) -> Word:
    async with scripted_engine() as proxy:
        proxy.script(*steps)
        word = await ask_ready(Address("127.0.0.1", proxy.port), timeout_s=timeout_s)
        assert [request.target for request in proxy.requests] == ["/ready"]
        assert proxy.requests[0].head.startswith(b"GET /ready HTTP/1.0\r\n"), "an answer without chunks, and no more"
        return word


async def test_an_answer_over_a_socket() -> None:
    assert await asked(b"HTTP/1.1 200 OK\r\n\r\n{}", close()) is Word.READY
    assert await asked(b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", close()) is Word.NOT_READY


async def test_one_that_says_nothing_is_silent() -> None:
    assert await asked(never(), timeout_s=0.05) is Word.SILENT


async def test_one_that_hangs_up_has_refused() -> None:
    assert await asked(close()) is Word.REFUSED
    assert await asked(reset()) is Word.REFUSED
    assert await ask_ready(Address("127.0.0.1", free_port())) is Word.REFUSED
