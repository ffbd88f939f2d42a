"""Every error of the project, grouped by what the caller can do about it.

PrefixCacheError
├── RequestError              the client's fault: answered with `status`, never retried
│   ├── InvalidRequest        400, a field is wrong, missing or not supported
│   ├── ContextLengthExceeded 400, prompt and answer do not fit the model
│   ├── RequestTooLarge       413, the body is over the limit
│   ├── RequestTooSlow        408, a large body takes too long to come
│   ├── ModelNotFound         404, no worker serves that name
│   └── WebSocketRefused      501, the proxy speaks HTTP alone
├── Unavailable               503, the same request may succeed later or on another worker
│   ├── Overloaded            429, too many requests wait already; `retry_after_s` says when to come again
│   ├── Draining              the worker ends soon and takes nothing new: another one may
│   ├── NoWorkerReady         none that serves the model is connected: one may be in a moment
│   └── EngineUnreachable     no connection to the engine: it has seen nothing of the request
├── WorkerFault               502, the worker failed while it held the request
│   └── EngineFault           an engine broke off, or its answer is no HTTP
│       └── EngineTimeout     504, an engine sent nothing for too long
├── ProtocolError             a peer on the worker stream broke protocol v1; its connection is closed
│   └── MalformedFrame        (protocol.py) one frame has wrong content; only its request fails
├── IndexUnavailable          Redis did not answer in time or at all; go on without a prediction
├── IntegrityError            a structure is not what its invariants say: a bug, raised by check_integrity()
├── ChildEnded                (cli/stack.py) a child of `prefixcache up` ended and is given up; the stack is stopped
└── ConfigError               a setting or a file is wrong; the program does not start
    └── UnsupportedAttention  (worker) the model's attention cannot be computed here
"""

from __future__ import annotations


class PrefixCacheError(Exception):
    """Root of the tree. `str(error)` is fit to be shown: it carries the value and the mend."""


class RequestError(PrefixCacheError):
    """The request is wrong; the fields are those of the OpenAI error envelope."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is wrong, missing or not supported; `param` names it."""


class ContextLengthExceeded(RequestError):
    """Prompt plus requested answer is longer than the model's context."""

    code = "context_length_exceeded"


class RequestTooLarge(RequestError):
    """The body has more bytes than the proxy reads."""

    status = 413
    code = "request_too_large"


class RequestTooSlow(RequestError):
    """The body held room for longer than it may without being there."""

    status = 408
    code = "request_timeout"


class ModelNotFound(RequestError):
    """No registered worker serves the requested model."""

    status = 404
    code = "model_not_found"


class WebSocketRefused(RequestError):
    """The client wants to speak another protocol than HTTP from here on."""

    status = 501
    code = "websocket_not_supported"


class Unavailable(PrefixCacheError):
    """No worker can take the request now; trying again later may help."""

    status = 503
    kind = "server_error"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        """`retry_after_s`: when to try again, where that is known."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """Too many requests wait already."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class Draining(Unavailable):
    """The worker ends soon, and takes nothing new."""


class NoWorkerReady(Unavailable):
    """No worker that serves the model can be sent anything now."""


class EngineUnreachable(Unavailable):
    """No connection to the engine could be made; it has seen nothing of the request."""

    code = "engine_unreachable"


class WorkerFault(PrefixCacheError):
    """The worker broke or vanished while it held the request."""

    status = 502
    kind = "server_error"
    code = "worker_fault"


class EngineFault(WorkerFault):
    """The engine broke off its answer, or what it sent is no answer."""

    code = "engine_fault"


class EngineTimeout(EngineFault):
    """The engine sent nothing for longer than is waited."""

    status = 504
    code = "engine_timeout"


class ProtocolError(PrefixCacheError):
    """A frame is malformed, too long, or not allowed in this state."""


class IndexUnavailable(PrefixCacheError):
    """The prefix index gave no answer; the caller goes on without a prediction."""


class IntegrityError(PrefixCacheError):
    """An invariant does not hold."""


class ConfigError(PrefixCacheError):
    """A setting or an input file is wrong."""
