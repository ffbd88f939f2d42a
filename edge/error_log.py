"""nginx's error log without what clients wrote: it ends many a line with the request, query and all."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable

_TIME = re.compile(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ")
_REQUEST = ', request: "'
_CRASH = re.compile(r"worker process \d+ exited on signal")
_logger = logging.getLogger(__name__)


def without_request(line: str) -> str:
    """What happened, and to whom. What a client wrote could look like any of what follows it: all of that goes, too."""
    return _TIME.sub("", line).partition(_REQUEST)[0].rstrip()


async def pass_on(lines: asyncio.StreamReader, crashed: Callable[[], None]) -> None:
    """Until nobody writes any more; `crashed` is called for each process that fell. Never late: nginx waits for it."""
    async for line in lines:
        text = without_request(line.decode("utf-8", "backslashreplace"))
        _logger.warning("%s", text)
        if _CRASH.search(text):
            crashed()


async def open_log(crashed: Callable[[], None]) -> tuple[int, asyncio.Task[None]]:
    """A descriptor to write to, which whoever calls this closes, and the task that ends once nobody has it open.

    A pipe of asyncio's own would keep nginx from having ended as long as any of its processes is there.
    """
    read, write = os.pipe()
    lines = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(lines)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read, "rb"))
    task = asyncio.create_task(pass_on(lines, crashed), name="error log")
    task.add_done_callback(lambda _: transport.close())
    return write, task
