"""What a generation tells its place: when it started, had its first token, and was gone."""

from __future__ import annotations

import pytest

from prefixcache.errors import WorkerFault
from tests.support.fake_worker import token_ids
from tests.unit.proxy.test_generation import Case

IDS = token_ids("Hello world")


async def test_one_that_ends() -> None:
    case = Case()
    async with case.generation:
        assert case.reserved.calls == []
        case.started()
        assert case.reserved.calls == ["started"]
        case.steps(IDS)
        assert case.reserved.calls == ["started", "first token"], "once, not with every token"
        case.end("stop", len(IDS))
        assert case.reserved.calls == ["started", "first token", "gone"], "before its scope ends"


async def test_one_whose_first_token_ends_it() -> None:
    case = Case(stop_token_ids=(IDS[0],))
    async with case.generation:
        case.step(0, IDS[0])
        assert case.reserved.calls == ["first token"]


async def test_a_stop_string_leaves_it_there_until_the_worker_has_ended_it() -> None:
    case = Case(stops=("Hello",))
    async with case.generation as generation:
        case.steps(IDS)
        assert generation.finish_reason == "stop"
        assert case.reserved.calls == ["first token"]
        case.end("aborted", len(IDS))
        assert case.reserved.calls == ["first token", "gone"]


@pytest.mark.parametrize("started", [False, True])
async def test_one_that_fails_or_is_left(started: bool) -> None:
    before = ["started"] if started else []
    for fails in (False, True):
        case = Case()
        async with case.generation:
            if started:
                case.started()
            if fails:
                case.stream.fail_all(WorkerFault("gone"))
                assert list(dict.fromkeys(case.reserved.calls)) == [*before, "gone"]
        assert set(case.reserved.calls) == {*before, "gone"}
