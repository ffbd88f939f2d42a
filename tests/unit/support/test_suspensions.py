"""Cancelled exactly where it is said."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.suspensions import Suspensions


async def _walk(seen: list[str]) -> str:
    for step in ("first", "second", "third"):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            seen.append(f"cancelled in {step}")
            raise
        seen.append(step)
    return "whole"


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_at_each_await(number: int) -> None:
    seen: list[str] = []
    suspensions = Suspensions(cancel_at=number)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(suspensions.of(_walk(seen)))
    steps = ["first", "second", "third"]
    assert seen == [*steps[: number - 1], f"cancelled in {steps[number - 1]}"]
    assert suspensions.was_cancelled and len(suspensions.places) == number
    assert all(place.startswith("_walk, line") for place in suspensions.places)


@pytest.mark.parametrize("number", [None, 4])
async def test_without_a_cancellation_it_is_as_if_it_was_not_there(number: int | None) -> None:
    seen: list[str] = []
    suspensions = Suspensions(cancel_at=number)
    assert await suspensions.of(_walk(seen)) == "whole"
    assert seen == ["first", "second", "third"]
    assert not suspensions.was_cancelled


async def test_values_and_errors_pass() -> None:
    async def fails() -> None:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, 7)
        assert await future == 7
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await Suspensions().of(fails())
