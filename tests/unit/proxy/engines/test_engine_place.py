"""What an engine is called."""

from __future__ import annotations

import re

import pytest

from prefixcache.errors import ConfigError
from prefixcache.registry import WORKER_ID_PATTERN
from proxy.engines.engine_place import read_engine_place, read_engine_places


@pytest.mark.parametrize(
    ("given", "url", "engine_id"),
    [
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000", "10.0.0.5:8000"),
        ("http://10.0.0.5:8000/", "http://10.0.0.5:8000", "10.0.0.5:8000"),
        ("http://10.0.0.5:8000/v1", "http://10.0.0.5:8000", "10.0.0.5:8000"),
        ("http://10.0.0.5:8000/v1/", "http://10.0.0.5:8000", "10.0.0.5:8000"),
        (" http://gpu-1 ", "http://gpu-1:80", "gpu-1:80"),
        ("https://API.example.org", "https://api.example.org:443", "api.example.org:443"),
        ("https://h/base/v1", "https://h:443/base", "h:443/base"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000"),
        ("http://h:1/v11", "http://h:1/v11", "h:1/v11"),
    ],
)
def test_url_and_id(given: str, url: str, engine_id: str) -> None:
    place = read_engine_place(given)
    assert (place.url, place.engine_id) == (url, engine_id)


_NO_ENGINES = """
10.0.0.5:8000
h
ftp://h
http://
http://h:x
http://h:99999
http://u:p@h
http://h/?a=1
http://h/#f
http://h/a b
http://h/\u00fc
http://[::1
unix:///s
"""


@pytest.mark.parametrize("given", [*_NO_ENGINES.splitlines(), f"http://{'h' * 200}"])
def test_what_is_no_engine(given: str) -> None:
    with pytest.raises(ConfigError, match="engine"):
        read_engine_place(given)


def test_an_id_is_fit_to_be_a_worker_id() -> None:
    assert re.fullmatch(WORKER_ID_PATTERN, read_engine_place("http://[::1]:8000/base").engine_id)


def test_several_keep_their_order() -> None:
    places = read_engine_places(["http://b:1", "http://a:1"])
    assert [place.engine_id for place in places] == ["b:1", "a:1"]


@pytest.mark.parametrize("urls", [["http://h:1", "http://h:1/v1"], ["http://h", "http://g", "http://h:80/"]])
def test_one_engine_given_twice(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        read_engine_places(urls)
