"""The judge finds what is wrong with an answer, and lets pass what is right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.chaos.judge import judge, judge_refusal
from tests.chaos.tally import Outcome, Tally, Verdict
from tests.support.bare_client import End, Reply
from tests.support.sim_oracle import ExpectedAnswer
from tests.support.sim_requests import CHAT, Asked

TRUE = ExpectedAnswer(text="a river", finish_reason="stop", prompt_tokens=9, completion_tokens=8)
USAGE = {"prompt_tokens": 9, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def asked(**fields: Any) -> Asked:
    return Asked(path=CHAT, body={"model": "sim", **fields}, expected=[TRUE])


def reply(
    content: bytes, *, status: int = 200, end: End = "complete", stream: bool = False, retry_after: str = ""
) -> Reply:
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    headers = {"content-type": kind, **({"retry-after": retry_after} if retry_after else {})}
    return Reply(asked_at=0.0, end=end, status=status, headers=headers, content=content)


def whole(text: str = "a river", reason: str = "stop", usage: Mapping[str, Any] = USAGE) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def delta(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


def events(*values: object) -> bytes:
    return b"".join(
        b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"
        for value in values
    )


WHOLE_STREAM = (delta("a ri"), delta("ver"), delta("", "stop"), {"choices": [], "usage": USAGE}, "[DONE]")
ERROR = {"error": {"message": "no worker went on with it", "type": "server_error", "code": "unavailable"}}


def outcome_of(it: Reply, *, was_killed: bool = False, **fields: Any) -> Outcome:
    verdict = judge(asked(**fields), it, was_killed=was_killed)
    assert verdict.why or not verdict.outcome.is_failure
    return verdict.outcome


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        (whole(), Outcome.RIGHT),
        (whole("a rivver"), Outcome.WRONG),
        (whole("a rive"), Outcome.WRONG),
        (whole(reason="length"), Outcome.WRONG),
        (whole(usage={**USAGE, "completion_tokens": 9}), Outcome.WRONG),
        (whole(usage={**USAGE, "prompt_tokens": 8}), Outcome.WRONG),
        (whole(usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 10}}), Outcome.WRONG),
        (b"{", Outcome.WRONG),
        (b"{}", Outcome.WRONG),
    ],
)
def test_a_whole_answer(content: bytes, outcome: Outcome) -> None:
    assert outcome_of(reply(content)) is outcome


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        (WHOLE_STREAM, Outcome.RIGHT),
        ((delta("a ri"), delta("ri"), delta("ver"), *WHOLE_STREAM[2:]), Outcome.WRONG),
        ((delta("a ri"), delta("er"), *WHOLE_STREAM[2:]), Outcome.WRONG),
        (WHOLE_STREAM[:-1], Outcome.CUT),
        ((*WHOLE_STREAM[:3], "[DONE]"), Outcome.WRONG),
        ((*WHOLE_STREAM, delta("more")), Outcome.WRONG),
        ((delta("a ri"), ERROR), Outcome.TOLD),
        ((delta("a rx"), ERROR), Outcome.WRONG),
        ((delta("a ri"), ERROR, "[DONE]"), Outcome.WRONG),
        ((delta("a ri"), {"error": {"message": "oh", "code": "internal_error"}}), Outcome.WRONG),
        ((delta("a ri"),), Outcome.WRONG),
    ],
)
def test_a_stream(values: tuple[object, ...], outcome: Outcome) -> None:
    assert outcome_of(reply(events(*values), stream=True), **STREAMED) is outcome


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_whole(stream: bool) -> None:
    content = events(delta("a ri")) if stream else b'{"cho'
    cut = reply(content, end="cut", stream=stream)
    assert outcome_of(cut, **STREAMED) is Outcome.CUT
    assert outcome_of(cut, was_killed=True, **STREAMED) is Outcome.KILLED
    left = reply(content, end="left", stream=stream)
    assert outcome_of(left, **STREAMED) is Outcome.LEFT
    assert outcome_of(reply(content, end="overdue", stream=stream), **STREAMED) is Outcome.LOST


def test_what_came_before_a_cut_must_be_right() -> None:
    wrong = events(delta("a sea"))
    assert outcome_of(reply(wrong, end="cut", stream=True), was_killed=True, **STREAMED) is Outcome.WRONG
    assert outcome_of(reply(wrong, end="left", stream=True), **STREAMED) is Outcome.WRONG


def test_no_answer_at_all() -> None:
    silent = Reply(asked_at=0.0, end="unanswered")
    assert outcome_of(silent) is Outcome.LOST
    assert outcome_of(silent, was_killed=True) is Outcome.KILLED
    assert outcome_of(Reply(asked_at=0.0, end="left")) is Outcome.LEFT


def test_statuses() -> None:
    error = json.dumps({"error": {"message": "later"}}).encode()
    assert outcome_of(reply(error, status=503, retry_after="1")) is Outcome.COME_AGAIN
    assert outcome_of(reply(error, status=429)) is Outcome.WRONG, "without Retry-After"
    assert outcome_of(reply(error, status=500)) is Outcome.BAD_STATUS
    assert outcome_of(reply(error, status=400)) is Outcome.BAD_STATUS


def test_refusals() -> None:
    error = json.dumps({"error": {"message": "no"}}).encode()
    assert judge_refusal((400,), reply(error, status=400)).outcome is Outcome.REFUSED
    assert judge_refusal((400,), reply(error, status=500)).outcome is Outcome.BAD_STATUS
    assert judge_refusal((400,), reply(whole(), status=200)).outcome is Outcome.BAD_STATUS
    assert judge_refusal((400,), reply(b'{"error":{"message":""}}', status=400)).outcome is Outcome.WRONG
    assert judge_refusal((400,), Reply(asked_at=0.0, end="unanswered")).outcome is Outcome.LOST
    assert judge_refusal((), Reply(asked_at=0.0, end="left")).outcome is Outcome.LEFT


def test_the_tally_leaves_nothing_out() -> None:
    tally = Tally()
    for outcome in Outcome:
        tally.add("some", Verdict(outcome=outcome, why="so"))
    tally.add("others", Verdict(outcome=Outcome.RIGHT))
    *_, total = tally.rows()
    assert total["all"] == tally.total == len(Outcome) + 1
    assert sum(count for name, count in total.items() if name in set(Outcome) and isinstance(count, int)) == tally.total
    assert len(tally.failures) == sum(outcome.is_failure for outcome in Outcome)
    assert tally.share(Outcome.RIGHT, ["others"]) == 1.0
