"""Requests that nobody may answer, each with the statuses that are right for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tests.support.bare_client import post_bytes
from tests.support.sim_requests import CHAT, COMPLETION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """Bytes, and what may come back. Without any status the client leaves: the request never ends."""

    name: str
    request: bytes
    statuses: Collection[int]


def _chat(**fields: Any) -> bytes:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
    return post_bytes(CHAT, body)


def _completion(**fields: Any) -> bytes:
    return post_bytes(COMPLETION, {"model": "sim", "prompt": "hello", "max_tokens": 4, **fields})


_HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
_WHOLE = _chat()

HOSTILE = (
    Hostile(name="no JSON", request=post_bytes(CHAT, b"{"), statuses=(400,)),
    Hostile(name="another JSON", request=post_bytes(CHAT, b"[1, 2]"), statuses=(400,)),
    Hostile(name="no UTF-8", request=post_bytes(CHAT, b'{"model": "\xff\xfe"}'), statuses=(400,)),
    Hostile(name="half a surrogate", request=post_bytes(CHAT, rb'{"model": "sim\ud83c"}'), statuses=(400,)),
    Hostile(name="deep nesting", request=post_bytes(CHAT, b'{"messages":' + b"[" * 100_000), statuses=(400,)),
    Hostile(name="nothing", request=post_bytes(CHAT, b""), statuses=(400,)),
    Hostile(name="no messages", request=post_bytes(CHAT, {"model": "sim"}), statuses=(400,)),
    Hostile(name="another model", request=_chat(model="nobody's"), statuses=(404,)),
    Hostile(name="unknown field", request=_chat(surprise=1), statuses=(400,)),
    Hostile(name="n of a million", request=_chat(n=1_000_000), statuses=(400,)),
    Hostile(name="no tokens", request=_chat(max_tokens=-1), statuses=(400,)),
    Hostile(name="temperature", request=_chat(temperature=1e300), statuses=(400,)),
    Hostile(name="many stops", request=_chat(stop=["x"] * 10_000), statuses=(400,)),
    Hostile(name="bias of no token", request=_chat(logit_bias={"999999": 1}), statuses=(400,)),
    Hostile(name="too long", request=_completion(prompt="long " * 100_000), statuses=(400,)),
    Hostile(name="ids of no token", request=_completion(prompt=[1, 2, 999_999]), statuses=(400,)),
    Hostile(name="negative ids", request=_completion(prompt=[-1]), statuses=(400,)),
    Hostile(name="512 prompts too many", request=_completion(prompt=["x"] * 600), statuses=(400,)),
    Hostile(name="unknown path", request=post_bytes("/v1/nothing", {}), statuses=(404,)),
    Hostile(name="another method", request=_WHOLE.replace(b"POST", b"GET", 1), statuses=(405,)),
    Hostile(name="no HTTP", request=b"\x00\x01\x02 hello\r\n\r\n", statuses=(400,)),
    Hostile(name="no length", request=_HEAD + b"Content-Length: many\r\n\r\n{}", statuses=(400,)),
    Hostile(name="too large", request=_HEAD + b"Content-Length: 99999999999\r\n\r\n{}", statuses=(413,)),
    Hostile(
        name="broken chunks",
        request=_HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nXYZ\r\n",
        statuses=(400,),
    ),
    Hostile(name="half a head", request=_HEAD, statuses=()),
    Hostile(name="half a body", request=_WHOLE[:-9], statuses=()),
    Hostile(name="a chunk for ever", request=_HEAD + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n{", statuses=()),
)
