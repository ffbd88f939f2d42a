"""One line for each request, without any of its text, and the request's count among the metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prefixcache.limits import MAX_REQUEST_ID_CHARS
from prefixcache.metrics import ProxyMetrics

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left before its answer was complete; never sent, only counted and logged."""

_SANE_REQUEST_ID = re.compile(rf"[\x20-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_MAX_PATH_CHARS = 200
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""What probes ask, again and again."""
_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class AccessRecord:
    """What is known of one request so far; each part of the path fills in its own."""

    request_id: str
    received_at: float
    """time.perf_counter() when the head had arrived."""
    status: int | None = None
    """Set before the end only where it is not the one sent: an error inside a stream, a client that left."""
    error_code: str | None = None
    """What the client was told went wrong."""
    counted: bool = False
    """Whether this is a request for tokens, which the request metrics are about."""
    model: str = ""
    worker: str = ""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    cached_tokens: int = 0
    copied_tokens: int | None = None
    """Less than a block of them after the cached ones, by own workers; None as the next."""
    computed_tokens: int | None = None
    """By own workers in prefills: with those before all of the prompt, more where something had to be repeated.

    None where a worker has not told: one that a request was lost with, or an engine; so are the preemptions.
    """
    completion_tokens: int = 0
    ttft_s: float | None = None
    queue_s: float | None = None
    """Of its generations on own workers the longest, likewise the next two."""
    prefill_s: float | None = None
    decode_s: float | None = None
    preemptions: int | None = None


ACCESS_RECORD = web.RequestKey("access_record", AccessRecord)


def request_id_of(given: str | None) -> str:
    """The client's own id if it is sane, else a new one."""
    return given if given is not None and _SANE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def access_middleware(metrics: ProxyMetrics) -> Middleware:
    """Gives each request its record, and logs and counts it at its end, however that comes about."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = AccessRecord(
            request_id=request_id_of(request.headers.get("x-request-id")), received_at=time.perf_counter()
        )
        request[ACCESS_RECORD] = record
        try:
            response = await handler(request)
            if not response.prepared:
                response.headers["x-request-id"] = record.request_id
            if record.status is None:
                record.status = response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            record.status = CLIENT_CLOSED_REQUEST
            raise
        finally:
            if record.counted:
                metrics.requests.labels(record.model, str(record.status)).inc()
                if record.error_code is not None:
                    metrics.request_errors.labels(record.error_code).inc()
            _log(request, record)

    return middleware


def _log(request: web.Request, record: AccessRecord) -> None:
    # The path as it was sent: a decoded one could hold a line break.
    path = request.rel_url.raw_path
    level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
    if not _logger.isEnabledFor(level):
        return
    total_ms = (time.perf_counter() - record.received_at) * 1e3
    _logger.log(
        level,
        "%s %s %s model=%s worker=%s prompt=%d hit=%d cached=%d copied=%s computed=%s completion=%d ttft_ms=%s "
        "queue_ms=%s prefill_ms=%s decode_ms=%s preempted=%s total_ms=%.1f error=%s id=%s",
        request.method,
        path[:_MAX_PATH_CHARS],
        record.status,
        record.model or "-",
        record.worker or "-",
        record.prompt_tokens,
        record.hit_tokens,
        record.cached_tokens,
        _or_dash(record.copied_tokens),
        _or_dash(record.computed_tokens),
        record.completion_tokens,
        *(_in_ms(seconds) for seconds in (record.ttft_s, record.queue_s, record.prefill_s, record.decode_s)),
        _or_dash(record.preemptions),
        total_ms,
        record.error_code or "-",
        record.request_id,
    )


def _or_dash(count: int | None) -> str:
    return "-" if count is None else str(count)


def _in_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
