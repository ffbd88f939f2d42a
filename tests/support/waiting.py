"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

FIRST_PAUSE_S = 0.001
MOST_PAUSE_S = 0.02


async def eventually(condition: Callable[[], Any | Awaitable[Any]], timeout_s: float = 5.0) -> None:
    """Returns once `condition`, plain or async, is true; fails with its last value after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"condition not met within {timeout_s} s; its last value was {value!r}")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_PAUSE_S)
