"""A place in an engine's answer, as a client behind the proxy can use it."""

from __future__ import annotations

import pytest

from proxy.engines.engine_url import EngineUrl
from proxy.engines.location import seen_from_outside


@pytest.mark.parametrize(
    ("engine", "place", "seen"),
    [
        ("http://gpu-1:8000", "http://gpu-1:8000/v1/files/f?a=b%20c#d", "/v1/files/f?a=b%20c#d"),
        ("http://gpu-1:8000", "HTTP://GPU-1:8000/v1/files", "/v1/files"),
        ("http://gpu-1:8000", "//gpu-1:8000/v1", "/v1"),
        ("http://gpu-1:8000", "http://gpu-1:8000", "/"),
        ("http://gpu-1:8000", "http://gpu-1:8000?x", "/?x"),
        ("http://[::1]:8000", "http://[::1]:8000/a", "/a"),
        ("https://gpu-1", "http://gpu-1/v1/x", "/v1/x"),
        ("https://gpu-1:443", "https://gpu-1/v1/x", "/v1/x"),
        ("http://gpu-1:8000/base", "http://gpu-1:8000/base/v1/x", "/v1/x"),
        ("http://gpu-1:8000/base", "/base/v1/x", "/v1/x"),
        ("http://gpu-1:8000/base", "/base", "/"),
        ("http://gpu-1:8000/base", "/based/v1/x", "/based/v1/x"),
        ("http://gpu-1:8000", "/v1/x/", "/v1/x/"),
    ],
)
def test_the_engine_itself_is_the_proxy(engine: str, place: str, seen: str) -> None:
    assert seen_from_outside(place.encode(), EngineUrl.parse(engine)) == seen.encode()


@pytest.mark.parametrize(
    "place",
    [
        "http://gpu-2:8000/v1",
        "http://gpu-1:8001/v1",
        "http://gpu-1/v1",
        "https://example.org/file?x=http://gpu-1:8000/",
        "ftp://gpu-1:8000/v1",
        "mailto:a@b",
        "v1/files",
        "../x",
        "?page=2",
        "",
        "http://[::1",
        "http://gpu-1:99999/x",
        "\u00e4\u00ff",
    ],
)
def test_anything_else_stays_as_it_is(place: str) -> None:
    assert seen_from_outside(place.encode("latin-1"), EngineUrl.parse("http://gpu-1:8000")) == place.encode("latin-1")


@pytest.mark.parametrize("path", ["//evil.example/x", "///evil.example/x", "/\\evil.example/x"])
def test_no_other_host_is_named_by_what_is_left(path: str) -> None:
    """As an engine redirects a client that asked for such a path."""
    seen = seen_from_outside(b"http://gpu-1:8000" + path.encode(), EngineUrl.parse("http://gpu-1:8000"))
    assert seen == b"/evil.example/x"
