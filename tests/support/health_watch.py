"""`python -m tests.support.health_watch URL`: asks until its stdin is closed, and prints how long the slowest took.

In a process of its own: a test that sends megabytes is late itself. Seconds.
"""

from __future__ import annotations

import asyncio
import select
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

POLL_S = 0.1
_ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def watched_health(url: str) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Of the program at `url`: gives what ends the watch and tells the seconds of the slowest answer."""
    command = [sys.executable, "-m", "tests.support.health_watch", f"{url}/health"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=_ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )

    async def slowest_s() -> float:
        told, _ = await process.communicate(b"")
        return float(told)

    try:
        yield slowest_s
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def main(url: str) -> None:
    slowest_s = 0.0
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        began = time.monotonic()
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200
            answer.read()
        slowest_s = max(slowest_s, time.monotonic() - began)
    print(slowest_s)


if __name__ == "__main__":
    main(sys.argv[1])
