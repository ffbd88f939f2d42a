"""Class sampling-logprobs: scores of a prompt do not depend on what was cached."""

from __future__ import annotations

from tests.cases.world import open_world
from tests.support.valkey import Server


async def test_rw_128_echo_with_log_probabilities_is_refused_by_name(valkey: Server) -> None:
    """The scores of cached positions are not kept, so that none are told at all: the same 400 each time."""
    async with open_world(valkey) as world:
        outcomes = await world.play("RW-128")
        assert [outcome.status for outcome in outcomes] == [400] * 3
        assert {outcome.error["param"] for outcome in outcomes} <= {"echo", "logprobs"}
        assert len({outcome.content for outcome in outcomes}) == 1
        assert "echo" in outcomes[0].error["message"] and "logprobs" in outcomes[0].error["message"]
        assert world.prompts == []
