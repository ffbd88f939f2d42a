"""Runs a coroutine and cancels its task at one of its awaits, by number.

suspensions = Suspensions(cancel_at=3)
await suspensions.of(work())        at the third await that really waits, a cancellation arrives there
suspensions.places                  where it waited, in order: "Predictor.match, line 195"
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
_NOT_OURS = ("/site-packages/", "/asyncio/")


class Suspensions:
    """Of one coroutine, which runs in a task of its own or in the middle of one."""

    def __init__(self, *, cancel_at: int | None = None) -> None:
        """`cancel_at` counts from 1."""
        self._cancel_at = cancel_at
        self.places: list[str] = []
        self.task: asyncio.Task[Any] | None = None

    @property
    def was_cancelled(self) -> bool:
        return self._cancel_at is not None and len(self.places) >= self._cancel_at

    async def of(self, work: Coroutine[Any, Any, T]) -> T:
        self.task = asyncio.current_task()
        result: T = await _Stepped(self, work)
        return result

    def suspended(self, place: str) -> None:
        self.places.append(place)
        if len(self.places) == self._cancel_at:
            assert self.task is not None
            asyncio.get_running_loop().call_soon(self.task.cancel)


class _Stepped:
    """Hands on what the coroutine waits for, one by one."""

    def __init__(self, suspensions: Suspensions, work: Coroutine[Any, Any, Any]) -> None:
        self._suspensions = suspensions
        self._work = work

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                awaited = self._work.send(value) if error is None else self._work.throw(error)
            except StopIteration as end:
                return end.value
            self._suspensions.suspended(_innermost(self._work))
            value = error = None
            try:
                value = yield awaited
            except BaseException as caught:  # a cancellation, too, belongs to the work
                error = caught


def _innermost(work: Any) -> str:
    """The coroutine of ours that waits, or what stands below it."""
    place = "?"
    while work is not None:
        frame = getattr(work, "cr_frame", None)
        if frame is not None and not any(part in frame.f_code.co_filename for part in _NOT_OURS):
            place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
        work = getattr(work, "cr_await", None)
    return place
