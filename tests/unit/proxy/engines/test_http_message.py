"""Requests as they are written: framing is ours alone, and nothing can smuggle a second one."""

from __future__ import annotations

import pytest

from prefixcache.errors import InvalidRequest
from proxy.engines.engine_url import EngineUrl
from proxy.engines.http_message import EngineRequest, request_parts

PLAIN = EngineUrl.parse("http://gpu-1:8000")


def request_bytes(request: EngineRequest, url: EngineUrl) -> bytes:
    return b"".join(request_parts(request, url))


def test_a_post_as_a_whole() -> None:
    request = EngineRequest(
        method="POST", target="/v1/completions?a=%20b", headers=[(b"Content-Type", b"application/json")], body=b"{}"
    )
    assert request_bytes(request, PLAIN) == (
        b"POST /v1/completions?a=%20b HTTP/1.1\r\nHost: gpu-1:8000\r\nContent-Type: application/json\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    )


def test_the_base_path_stands_before_the_target_and_the_host_is_the_engines() -> None:
    url = EngineUrl.parse("http://[::1]:9/base/path/")
    written = request_bytes(EngineRequest(method="GET", target="/v1/models"), url)
    assert written == b"GET /base/path/v1/models HTTP/1.1\r\nHost: [::1]:9\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [("POST", b"", b"0"), ("PUT", b"abc", b"3"), ("GET", b"", None), ("DELETE", b"", None), ("DELETE", b"x", b"1")],
)
def test_content_length_is_counted(method: str, body: bytes, length: bytes | None) -> None:
    written = request_bytes(EngineRequest(method=method, target="/", body=body), PLAIN)
    head, _, sent = written.partition(b"\r\n\r\n")
    assert sent == body
    lengths = [line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
    assert lengths == ([] if length is None else [length])


def test_framing_and_hop_headers_of_a_caller_are_left_out() -> None:
    given = b"Host Content-Length TRANSFER-ENCODING Expect Connection Keep-Alive Upgrade TE Trailer Proxy-Connection"
    headers = [(name, b"9") for name in given.split()]
    written = request_bytes(EngineRequest(method="POST", target="/", headers=headers, body=b"abc"), PLAIN)
    assert written == b"POST / HTTP/1.1\r\nHost: gpu-1:8000\r\nContent-Length: 3\r\n\r\nabc"


@pytest.mark.parametrize("target", ["", "v1", "/a b", "/a\r\nX: y", "/a\n", "/ä", "/a\x00", "/a\x7f", "http://h/", "*"])
def test_a_target_that_is_none(target: str) -> None:
    with pytest.raises(InvalidRequest):
        request_bytes(EngineRequest(method="GET", target=target), PLAIN)


@pytest.mark.parametrize("method", ["", "GE T", "GET\r\n", "GÄT", "GET / HTTP/1.1\r\nX: "])
def test_a_method_that_is_none(method: str) -> None:
    with pytest.raises(InvalidRequest):
        request_bytes(EngineRequest(method=method, target="/"), PLAIN)


@pytest.mark.parametrize(
    "header",
    [
        (b"X-Request-Id", b"a\r\nX-Evil: 1"),
        (b"X-Request-Id", b"a\n\n"),
        (b"X-Request-Id", b"a\rb"),
        (b"X-Request-Id", b"a\0b"),
        (b"X\r\nX-Evil", b"1"),
    ],
)
def test_a_header_cannot_bring_another_one(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(InvalidRequest):
        request_bytes(EngineRequest(method="POST", target="/", headers=[header]), PLAIN)


@pytest.mark.parametrize("name", [b"Content-Length ", b"Content-Length\t", b" Transfer-Encoding", b"", b"a b", b"a:b"])
def test_a_header_name_that_is_none_cannot_hide_a_framing_header(name: bytes) -> None:
    with pytest.raises(InvalidRequest):
        request_bytes(EngineRequest(method="POST", target="/", headers=[(name, b"5")], body=b"abc"), PLAIN)
