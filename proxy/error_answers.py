"""Every error a client can get, in OpenAI's envelope: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from prefixcache.errors import InvalidRequest, RequestError, Unavailable, WorkerFault
from prefixcache.limits import RETRY_AFTER_S
from proxy.access_log import ACCESS_RECORD
from proxy.json_answers import json_answer
from proxy.request_body import body_too_large

_MAX_MESSAGE_CHARS = 2_000
_MAX_PATH_CHARS = 200
_logger = logging.getLogger(__name__)


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorBody


def described(error: Exception) -> tuple[int, ErrorEnvelope]:
    """HTTP status and envelope; an error that is nobody's but ours is logged and told without detail."""
    match error:
        case RequestError():
            body = ErrorBody(message=_shown(error), type=error.kind, param=error.param, code=error.code)
            return error.status, ErrorEnvelope(error=body)
        case Unavailable() | WorkerFault():
            return error.status, ErrorEnvelope(error=ErrorBody(message=_shown(error), type=error.kind, code=error.code))
        case _:
            _logger.error("internal error", exc_info=error)
            body = ErrorBody(message="internal error", type="server_error", code="internal_error")
            return HTTPStatus.INTERNAL_SERVER_ERROR, ErrorEnvelope(error=body)


def error_code(error: Exception) -> str:
    """The kind of an error in one word, for metrics and logs."""
    match error:
        case RequestError():
            return error.code or "invalid_request"
        case Unavailable() | WorkerFault():
            return error.code
        case _:
            return "internal_error"


def error_answer(error: Exception) -> web.Response:
    status, envelope = described(error)
    return json_answer(envelope, status=status, headers=retry_headers(error))


def retry_headers(error: Exception) -> Mapping[str, str] | None:
    """When to come again, of what may be otherwise then."""
    return {"Retry-After": str(error.retry_after_s or RETRY_AFTER_S)} if isinstance(error, Unavailable) else None


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises before its answer began into an envelope."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _recorded(request, body_too_large())
    except web.HTTPException as error:
        return _http_answer(request, error)
    except web.RequestPayloadError:
        return _recorded(request, InvalidRequest("the body could not be read as announced"))
    except ConnectionError:
        raise
    except Exception as error:
        return _recorded(request, error)


def _recorded(request: web.Request, error: Exception) -> web.Response:
    request[ACCESS_RECORD].error_code = error_code(error)
    return error_answer(error)


def _http_answer(request: web.Request, error: web.HTTPException) -> web.Response:
    """404, 405 and other answers of the HTTP layer."""
    where = f"{request.method} {request.rel_url.raw_path[:_MAX_PATH_CHARS]}"
    if error.status == HTTPStatus.NOT_FOUND:
        body = ErrorBody(message=f"Invalid URL ({where})", type="invalid_request_error", code="unknown_url")
    elif error.status == HTTPStatus.METHOD_NOT_ALLOWED:
        body = ErrorBody(message=f"Not allowed ({where})", type="invalid_request_error", code="method_not_allowed")
    else:
        kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        body = ErrorBody(message=error.reason, type=kind)
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    return json_answer(ErrorEnvelope(error=body), status=error.status, headers=headers)


def _shown(error: Exception) -> str:
    return str(error)[:_MAX_MESSAGE_CHARS]
