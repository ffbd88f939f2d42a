"""Whether a stream said itself that it is over: a connection that ends in good order says nothing of the answer.

    everywhere       data: [DONE]                                       or  data: {"error": ...}
    /v1/messages     {"type": "message_stop", ...}                      or  {"type": "error", ...}
    /v1/responses    {"type": "response.completed", ...}, incomplete..  or  {"type": "error", ...}

None of these can stand inside the text of an answer: a line end and a quote are written with a backslash there. An
event in JSON is told once its line has ended.
"""

from __future__ import annotations

import re

_MOST_MARK_BYTES = 64
_DONE = re.compile(rb"[\r\n]data:[ ]?\[DONE\]")
_ERROR = rb"[\r\n]data:[ ]?\{[ ]?\"error\""
_COMPLETION = ((b'"error"',), re.compile(_ERROR))
_MARKS = {
    "/v1/chat/completions": _COMPLETION,
    "/v1/completions": _COMPLETION,
    "/v1/messages": (
        (b"message_stop", b'"error"'),
        re.compile(rb"\"type\"[ ]?:[ ]?\"(?:message_stop|error)\"|" + _ERROR),
    ),
    "/v1/responses": (
        (b'"response.completed"', b'"response.incomplete"', b'"response.failed"', b'"response.cancelled"', b'"error"'),
        re.compile(rb"\"type\"[ ]?:[ ]?\"(?:response\.(?:completed|incomplete|failed|cancelled)|error)\"|" + _ERROR),
    ),
}
"""Of each path: words of which one must stand in its last event, which is found out fast, and what must besides."""


class StreamEnd:
    """Of one answer; sees all that goes to the client."""

    def __init__(self, path: str) -> None:
        """`path` is one of those whose streams have an end of their own."""
        self._words, self._mark = _MARKS[path]
        self._tail = b"\n"
        self._is_done = False
        self._has_last = False
        """Whether the event that is the last one has begun."""

    @property
    def is_told(self) -> bool:
        return self._is_done or (self._has_last and self._tail.endswith((b"\n", b"\r")))

    def feed(self, data: bytes) -> None:
        """A piece of it, cut anywhere."""
        seen = self._tail + data
        if b"[DONE]" in seen and _DONE.search(seen) is not None:
            self._is_done = True
        for word in self._words:
            if word in seen and self._mark.search(seen) is not None:
                self._has_last = True
        self._tail = seen[-_MOST_MARK_BYTES:]
