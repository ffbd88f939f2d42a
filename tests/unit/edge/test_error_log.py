"""nginx's error lines: what happened stays, what a client wrote goes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from edge.error_log import pass_on, without_request

LINE = (
    "2026/11/30 08:00:00 [error] 12#12: *5 connect() failed (111: Connection refused) while connecting to upstream, "
    'client: 10.1.1.1, server: , request: "POST /v1/chat?key=secret HTTP/1.1", '
    'upstream: "http://10.0.0.1:8000/v1/chat?key=secret", host: "secret", referrer: "http://secret/"'
)
KEPT = (
    "[error] 12#12: *5 connect() failed (111: Connection refused) while connecting to upstream, "
    "client: 10.1.1.1, server:"
)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (LINE, KEPT + " "),
        (LINE.replace("key=secret", 'x", request: "again', 1), KEPT + " "),
        ("nginx: [emerg] bind() to 0.0.0.0:80 failed\n", "nginx: [emerg] bind() to 0.0.0.0:80 failed"),
        (
            "2026/11/30 08:00:00 [alert] 1#1: worker process 7 exited on signal 9",
            "[alert] 1#1: worker process 7 exited on signal 9",
        ),
        ("", ""),
    ],
)
def test_lines(line: str, kept: str) -> None:
    assert without_request(line) == kept.rstrip()


async def test_each_process_that_fell_is_told_of() -> None:
    lines = asyncio.StreamReader()
    lines.feed_data(b"2026/11/30 08:00:00 [alert] 1#1: worker process 7 exited on signal 9\n" * 2)
    lines.feed_data(f"{LINE.replace('*5', 'worker process 1 exited with code 0')}\n".encode())
    lines.feed_data(LINE.replace("key=secret", "worker process 7 exited on signal 9").encode())
    lines.feed_eof()
    told: list[int] = []
    await pass_on(lines, lambda: told.append(len(told)))
    assert told == [0, 1]


async def test_all_lines_pass_until_the_end(caplog: pytest.LogCaptureFixture) -> None:
    lines = asyncio.StreamReader()
    lines.feed_data(f"{LINE}\n".encode() + b"\xff without an end")
    lines.feed_eof()
    with caplog.at_level(logging.WARNING):
        await pass_on(lines, pytest.fail)
    assert [record.getMessage() for record in caplog.records] == [KEPT.rstrip(","), "\\xff without an end"]
