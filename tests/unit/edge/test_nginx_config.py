"""The text that nginx reads: what it must hold, whatever the list and the keys."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from edge.address import Address
from edge.config import EdgeConfig, Name
from edge.nginx_config import nginx_config
from prefixcache.limits import EDGE_READ_TIMEOUT_S, EDGE_TRIES, MAX_BODY_BYTES

ONE, SIX = Address("10.0.0.1", 8000), Address("fd00::1", 8000)
KEY = "sk-a.b+c/d=0123456"


def config_text(*proxies: Address, api_keys: tuple[str, ...] = (), num_files: int = 1_000) -> str:
    config = EdgeConfig(
        proxies=(Name(host="proxy", port=8000),),
        listen="0.0.0.0:8000",
        run_dir=Path("/run/edge"),
        tmp_dir=Path("/tmp"),
        num_processes=3,
        nginx="nginx",
        api_keys=api_keys,
    )
    return nginx_config(config, proxies, probe_key="the-probes-own-key", num_files=num_files)


def directives(text: str, name: str) -> list[str]:
    return [value.strip() for value in re.findall(rf"^ *{name} ([^;]+);", text, re.MULTILINE)]


def test_proxies_stand_in_it_with_their_ports_and_never_as_failed() -> None:
    text = config_text(ONE, SIX)
    assert re.findall(r"^ *server (\S.* max_fails=\d+);$", text, re.MULTILINE) == [
        "10.0.0.1:8000 max_fails=0",
        "[fd00::1]:8000 max_fails=0",
    ]
    assert "least_conn;" in text and "zone proxies" in text, "counted over all processes"


def test_what_a_stream_and_a_retry_need() -> None:
    text = config_text(ONE)
    assert directives(text, "proxy_buffering") == ["off"]
    assert directives(text, "proxy_request_buffering") == ["on"]
    assert directives(text, "proxy_http_version") == ["1.1"]
    assert directives(text, "proxy_socket_keepalive") == ["on"]
    assert directives(text, "proxy_next_upstream_tries") == [str(EDGE_TRIES)]
    assert directives(text, "proxy_read_timeout") == [f"{EDGE_READ_TIMEOUT_S}s"]
    assert directives(text, "client_max_body_size") == [str(MAX_BODY_BYTES)]
    assert directives(text, "keepalive_timeout") == ["0"]
    (retried,) = directives(text, "proxy_next_upstream")
    assert set(retried.split()) == {"error", "timeout", "invalid_header", "http_503", "non_idempotent"}


def test_without_a_proxy_it_answers_by_itself() -> None:
    text = config_text()
    assert "proxy_pass" not in text and "upstream proxies" not in text
    assert text.count("return 503") >= 3


def test_files_and_processes() -> None:
    text = config_text(ONE, num_files=500)
    assert directives(text, "worker_rlimit_nofile") == ["500"]
    assert "worker_connections 250;" in text, "one to the client and one to the proxy"
    assert directives(text, "worker_processes") == ["3"]


@pytest.mark.parametrize("proxies", [(), (ONE,)])
@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_every_own_answer_is_json_in_openais_shape(proxies: tuple[Address, ...], keys: tuple[str, ...]) -> None:
    text = config_text(*proxies, api_keys=keys)
    bodies = re.findall(r"return (\d+) '([^']*)';", text)
    assert {int(status) for status, _ in bodies} == {400, 401, 404, 408, 413, 414, 431, 500, 503}
    for _status, body in bodies:
        assert "$" not in body, "nginx would take it for a variable"
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_keys_are_compared_to_the_letter_and_taken_literally() -> None:
    text = config_text(ONE, api_keys=(KEY,))
    patterns = re.findall(r'^ *"~(\S.*)" 1;$', text, re.MULTILINE)
    assert len(patterns) == 2, "the probe's own beside the client's"
    of_client = re.compile(patterns[0])
    assert of_client.search(f"Bearer {KEY}") and of_client.search(f"bearer {KEY}")
    for wrong in (f"Bearer {KEY.upper()}", f"Bearer {KEY}x", f"xBearer {KEY}", "Bearer sk-axb+c/d=0123456"):
        assert not of_client.search(wrong)
    assert 'proxy_set_header Authorization "";' in text
    assert "map $http_authorization" not in config_text(ONE)
