"""Which status and envelope each error becomes."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from prefixcache.errors import (
    ContextLengthExceeded,
    IndexUnavailable,
    InvalidRequest,
    ModelNotFound,
    RequestTooLarge,
    Unavailable,
    WorkerFault,
)
from proxy.error_answers import described, error_answer, error_middleware

INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "status", "envelope"),
    [
        (InvalidRequest("no", param="n"), 400, {"message": "no", "type": INVALID, "param": "n", "code": None}),
        (
            ContextLengthExceeded("long", param="messages"),
            400,
            {"message": "long", "type": INVALID, "param": "messages", "code": "context_length_exceeded"},
        ),
        (RequestTooLarge("big"), 413, {"message": "big", "type": INVALID, "param": None, "code": "request_too_large"}),
        (
            ModelNotFound("none", param="model"),
            404,
            {"message": "none", "type": INVALID, "param": "model", "code": "model_not_found"},
        ),
        (Unavailable("later"), 503, {"message": "later", "type": "server_error", "param": None, "code": "unavailable"}),
        (
            WorkerFault("broke"),
            502,
            {"message": "broke", "type": "server_error", "param": None, "code": "worker_fault"},
        ),
    ],
)
def test_our_own_errors(error: Exception, status: int, envelope: dict[str, object]) -> None:
    told_status, told = described(error)
    assert (told_status, msgspec.to_builtins(told)) == (status, {"error": envelope})


@pytest.mark.parametrize("error", [RuntimeError("secret detail"), IndexUnavailable("secret detail")])
def test_a_bug_is_logged_and_told_without_detail(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    status, told = described(error)
    assert status == 500
    assert "secret" not in json.dumps(msgspec.to_builtins(told))
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None and record.exc_info[1] is error


async def test_a_lost_connection_is_nobodys_error(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    with pytest.raises(ConnectionResetError):
        await error_middleware(make_mocked_request("GET", "/"), handler)
    assert caplog.records == []


def test_a_long_message_is_cut() -> None:
    assert len(described(InvalidRequest("x" * 10**6))[1].error.message) == 2000


def test_only_unavailable_says_when_to_come_back() -> None:
    assert error_answer(Unavailable("x")).headers["Retry-After"] == "1"
    assert "Retry-After" not in error_answer(WorkerFault("x")).headers
