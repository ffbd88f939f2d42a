"""Whether one reply is what it must be, from what was asked, what came, and what was done to its proxy. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection

from tests.chaos.tally import Outcome, Verdict
from tests.support.bare_client import Reply
from tests.support.seen_answer import SeenAnswer
from tests.support.sim_requests import Asked

COME_AGAIN = (429, 503)
TOLD_CODES = ("unavailable", "rate_limit_exceeded", "worker_fault")
"""Of error events: reasons outside of the request."""


def judge(asked: Asked, reply: Reply, *, was_killed: bool) -> Verdict:
    """`was_killed`: by SIGKILL, while its proxy had the request; then whatever it sent before must be right."""
    if reply.end == "overdue":
        return Verdict(outcome=Outcome.LOST, why=f"no end within the time, {len(reply.content)} bytes came")
    if reply.status is None:
        if reply.end == "left":
            return Verdict(outcome=Outcome.LEFT)
        killed = Outcome.KILLED if was_killed else Outcome.LOST
        return Verdict(outcome=killed, why="" if was_killed else f"{reply.end}, though its proxy lives")
    if reply.status in COME_AGAIN:
        return _come_again(reply)
    if reply.status != 200:
        return Verdict(outcome=Outcome.BAD_STATUS, why=f"{reply.status} {reply.content[:300]!r}")
    try:
        return _answer(asked, reply, was_killed=was_killed)
    except (AssertionError, ValueError, LookupError) as error:
        return Verdict(outcome=Outcome.WRONG, why=f"not readable: {error!r} in {reply.content[-300:]!r}")


def judge_refusal(allowed: Collection[int], reply: Reply, name: str = "") -> Verdict:
    """Of a request that nobody may take, unless `allowed` says so."""
    if reply.end == "left":
        return Verdict(outcome=Outcome.LEFT)
    if reply.end == "overdue":
        return Verdict(outcome=Outcome.LOST, why=f"{name}: no answer")
    if reply.status is None:
        return Verdict(outcome=Outcome.LOST, why=f"{name}: {reply.end}, though its proxy lives")
    if reply.status not in allowed:
        if reply.status in COME_AGAIN:
            return _come_again(reply)
        return Verdict(outcome=Outcome.BAD_STATUS, why=f"{name}: {reply.status} {reply.content[:300]!r}")
    if reply.status >= 400 and not json.loads(reply.content)["error"]["message"]:
        return Verdict(outcome=Outcome.WRONG, why=f"{name}: no message in {reply.content!r}")
    return Verdict(outcome=Outcome.REFUSED, why=str(reply.status))


def _come_again(reply: Reply) -> Verdict:
    error = json.loads(reply.content)["error"]
    if int(reply.headers.get("retry-after", 0)) < 1:
        return Verdict(outcome=Outcome.WRONG, why=f"{reply.status} without Retry-After: {error}")
    return Verdict(outcome=Outcome.COME_AGAIN, why=f"{reply.status} {error['message']}")


def _answer(asked: Asked, reply: Reply, *, was_killed: bool) -> Verdict:
    if not reply.is_stream:
        if reply.end != "complete":
            return _not_whole(reply, was_killed=was_killed)
        wrong = SeenAnswer.of_whole(reply.content).differs(asked.expected)
        return Verdict(outcome=Outcome.WRONG, why=f"{asked.body}: {wrong}") if wrong else Verdict(outcome=Outcome.RIGHT)
    seen = SeenAnswer.of_stream(reply.content)
    is_whole = reply.end == "complete" and seen.error is None
    if wrong := seen.differs(asked.expected, is_whole=is_whole):
        return Verdict(outcome=Outcome.WRONG, why=f"{asked.body}: {wrong}")
    if seen.error is not None:
        if seen.error["code"] not in TOLD_CODES:
            return Verdict(outcome=Outcome.WRONG, why=f"error event {seen.error}")
        return Verdict(outcome=Outcome.TOLD, why=seen.error["message"])
    if reply.end != "complete":
        return _not_whole(reply, was_killed=was_killed)
    if not seen.is_done:
        return Verdict(outcome=Outcome.CUT, why="a clean end without [DONE]")
    if asked.body.get("stream_options") and seen.usage is None:
        return Verdict(outcome=Outcome.WRONG, why="no usage")
    return Verdict(outcome=Outcome.RIGHT)


def _not_whole(reply: Reply, *, was_killed: bool) -> Verdict:
    if reply.end == "left":
        return Verdict(outcome=Outcome.LEFT)
    if was_killed:
        return Verdict(outcome=Outcome.KILLED)
    return Verdict(outcome=Outcome.CUT, why=f"after {len(reply.content)} bytes, though its proxy lives")
