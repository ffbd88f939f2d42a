"""URLs of engines, right and wrong."""

from __future__ import annotations

import pytest

from prefixcache.errors import ConfigError
from proxy.engines.engine_url import EngineUrl


@pytest.mark.parametrize(
    ("text", "host", "port", "host_header", "base_path", "shown"),
    [
        ("http://gpu-1:8000", "gpu-1", 8000, b"gpu-1:8000", b"", "http://gpu-1:8000"),
        ("http://GPU-1", "gpu-1", 80, b"gpu-1", b"", "http://gpu-1"),
        ("https://gpu-1/", "gpu-1", 443, b"gpu-1", b"", "https://gpu-1"),
        ("http://h:1/team/a/", "h", 1, b"h:1", b"/team/a", "http://h:1/team/a"),
        ("http://[::1]:8000", "::1", 8000, b"[::1]:8000", b"", "http://[::1]:8000"),
        ("HTTP://h:1/Case", "h", 1, b"h:1", b"/Case", "http://h:1/Case"),
    ],
)
def test_what_a_url_says(text: str, host: str, port: int, host_header: bytes, base_path: bytes, shown: str) -> None:
    url = EngineUrl.parse(text)
    assert (url.host, url.port, url.host_header, url.base_path) == (host, port, host_header, base_path)
    assert url.text == shown
    assert url.is_tls == shown.startswith("https")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu-1:8000", "http://"),
        ("", "http://"),
        ("ftp://gpu-1", "http://"),
        ("http+unix://%2Frun%2Fvllm.sock", "http://"),
        ("http://", "no host"),
        ("http://:8000", "no host"),
        ("http://h:70000", "ort"),
        ("http://h:x", "ort"),
        ("http://h:0", "port 0"),
        ("http://h/v1?key=1", "query"),
        ("http://h/#a", "fragment"),
        ("http://h/ä", "%XX"),
        ("http://h/a b", "%XX"),
        ("http://[::1", "'http://[::1'"),
    ],
)
def test_a_wrong_url_is_refused_with_its_mend(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineUrl.parse(text)
    assert says in str(refused.value)
    assert "write http://HOST:PORT" in str(refused.value)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        EngineUrl.parse("https://user:s3cret@gpu-1:8000/v1")
    assert "s3cret" not in str(refused.value) and "user:" not in str(refused.value)
    assert "gpu-1:8000" in str(refused.value) and "Authorization" in str(refused.value)
