"""The text that nginx reads: what it must hold, whatever the list and the keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge.address import Address
from edge.capacity import capacity
from edge.config import EdgeConfig, Name
from edge.nginx_config import nginx_config
from prefixcache.limits import (
    EDGE_BODY_BUFFER_BYTES,
    EDGE_HEADER_BUFFERS,
    EDGE_READ_TIMEOUT_S,
    EDGE_TRIES,
    MAX_BODY_BYTES,
    MAX_HEADER_LINE_BYTES,
)

ONE, SIX = Address("10.0.0.1", 8000), Address("fd00::1", 8000)
KEY = "sk-a.b+c/d=0123456"
NUM_CLIENTS = 300
ROOM = capacity(num_clients=NUM_CLIENTS, num_processes=3, num_files=1_000)


def config_text(*proxies: Address, api_keys: tuple[str, ...] = ()) -> str:
    config = EdgeConfig(
        proxies=(Name(host="proxy", port=8000),),
        listen="0.0.0.0:8000",
        published="0.0.0.0",
        run_dir=Path("/run/edge"),
        tmp_dir=Path("/tmp"),
        num_processes=3,
        num_clients=NUM_CLIENTS,
        nginx="nginx",
        api_keys=api_keys,
    )
    return nginx_config(config, proxies, ROOM, probe_key="the-probes-own-key")


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


def test_files_processes_and_what_clients_may_hold() -> None:
    text = config_text(ONE)
    assert directives(text, "worker_rlimit_nofile") == ["1000"]
    assert f"worker_connections {ROOM.num_connections};" in text
    assert directives(text, "worker_processes") == ["3"]
    assert directives(text, "limit_conn") == [f"in_hand_0 {NUM_CLIENTS}"]
    assert directives(text, "client_body_buffer_size") == [str(EDGE_BODY_BUFFER_BYTES)]
    assert directives(text, "large_client_header_buffers") == [f"{EDGE_HEADER_BUFFERS} {MAX_HEADER_LINE_BYTES}"]
    (listens,) = directives(text, "listen")
    assert "reuseport" in listens, "else one process may take all clients, and has no connection left to a proxy"


@pytest.mark.parametrize("proxies", [(), (ONE,)])
@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_only_ready_and_metrics_pass_without_a_key(proxies: tuple[Address, ...], keys: tuple[str, ...]) -> None:
    text = config_text(*proxies, api_keys=keys)
    places = dict(re.findall(r"^        location (= /[a-z]+|/) \{(.*?)\}$", text, re.MULTILINE | re.DOTALL))
    others = set(re.findall(r"^ *location (.+?) \{", text, re.MULTILINE)) - set(places)
    assert set(places) == {"= /metrics", "= /ready", "/"}
    assert all(place.startswith("= /.edge/") for place in others), "which are internal"
    assert text.count("internal;") == len(others)
    assert ("$has_key" in places["/"]) is bool(keys)
    if proxies:
        assert "proxy_pass http://proxies/ready;" in text, "and not what a client wrote for it"


def test_keys_are_compared_to_the_letter_and_taken_literally() -> None:
    text = config_text(ONE, api_keys=(KEY,))
    patterns = re.findall(r'^ *"~(\^\[ .*)" 1;$', text, re.MULTILINE)
    assert len(patterns) == 2, "the probe's own beside the client's"
    of_client = re.compile(patterns[0])
    for right in (f"Bearer {KEY}", f"bearer {KEY}", f"BEARER\t {KEY}\t", f" Bearer {KEY} "):
        assert of_client.search(f"{right},") and of_client.search(f"{right},another"), right
    for right in (KEY, f" {KEY}\t"):
        assert of_client.search(f",{right}") and of_client.search(f"Bearer another,{right}"), right
    other = "sk-axb+c/d=0123456"
    for wrong in (KEY.upper(), f"{KEY}x", f"x{KEY}", f"{KEY} {KEY}", other, ""):
        assert not of_client.search(f"Bearer {wrong},") and not of_client.search(f",{wrong}"), wrong
    for wrong in (f"xBearer {KEY},", f"Bearer{KEY},", f"{KEY},", f",Bearer {KEY}"):
        assert not of_client.search(wrong), wrong
    for name in ("Authorization", "X-Api-Key"):
        cleared = f'proxy_set_header {name} "";'
        assert cleared in text and cleared not in config_text(ONE)
    assert "$http_authorization" not in config_text(ONE)
