"""The text of nginx's configuration, for one list of proxies.

What it promises:
- A request goes to the proxy with the fewest, and to another one if that fails before the first byte of its answer;
  what has begun is never repeated. A stream whose proxy vanished is cut, so that nobody takes it for a whole answer.
- Bytes pass on as they come, in both directions of a stream; a body is held until it is complete, as a retry needs it.
- Every connection of a client ends with its answer. nginx closes those that wait for a next request whenever it takes a
  new list, and a request that was on its way would be lost.
- What the edge says itself has the shape of OpenAI's errors. Where no proxy answers it is 503 and Retry-After, not 502.
- No line of the access log holds a query or a body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edge.address import Address
from edge.config import EdgeConfig
from edge.metrics import CONTENT_TYPE
from prefixcache.limits import (
    AWAY_RETRY_AFTER_S,
    EDGE_CONNECT_TIMEOUT_S,
    EDGE_GENERATION_S,
    EDGE_READ_TIMEOUT_S,
    EDGE_TRIES,
    MAX_BODY_BYTES,
)

_OWN = "/.edge"
"""Where the edge's own answers are; unknown to clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAnswer:
    """An error that the edge answers itself."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    headers: tuple[str, ...] = ()

    @property
    def body(self) -> str:
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return json.dumps({"error": error})

    @property
    def returned(self) -> str:
        headers = "".join(f"add_header {header} always; " for header in self.headers)
        return f"default_type application/json; {headers}return {self.status} '{self.body}';"


_NO_PROXY = OwnAnswer(
    status=503,
    message="no proxy answers, try again",
    kind="server_error",
    code="unavailable",
    headers=(f"Retry-After {AWAY_RETRY_AFTER_S}",),
)
_ERRORS = {
    400: OwnAnswer(status=400, message="the request is no valid HTTP"),
    404: OwnAnswer(status=404, message="Invalid URL", code="unknown_url"),
    408: OwnAnswer(status=408, message="the request took too long to arrive", code="request_timeout"),
    413: OwnAnswer(status=413, message=f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"),
    414: OwnAnswer(status=414, message="the URL is too long", code="url_too_long"),
    494: OwnAnswer(status=431, message="the headers are too long", code="headers_too_long"),
    502: _NO_PROXY,
    504: _NO_PROXY,  # one that lets a connection wait, too
    500: OwnAnswer(status=500, message="internal error at the edge", kind="server_error", code="internal_error"),
}
_UNAUTHORIZED = OwnAnswer(
    status=401,
    message="an API key is needed: Authorization: Bearer KEY",
    code="invalid_api_key",
    headers=("WWW-Authenticate Bearer",),
)
_NO_METRICS = OwnAnswer(
    status=404,
    message="each proxy has metrics of its own: scrape all of them, not the edge",
    code="unknown_url",
)

_TEMPLATE = """\
worker_processes {num_processes};
worker_rlimit_nofile {num_files};
worker_shutdown_timeout {generation_s}s;
daemon off;
pid {run_dir}/nginx.pid;
error_log stderr warn;
events {{ worker_connections {num_connections}; }}
http {{
    log_format line '$time_iso8601 $remote_addr $method $path $status bytes=$body_bytes_sent '
                    'seconds=$request_time proxy="$upstream_addr" proxy_status="$upstream_status" '
                    'id=$sent_http_x_request_id';
    map $request $method {{ ~^(\\S+) $1; }}
    map $request_uri $path {{ ~^([^?]*) $1; }}
    map $path $is_logged {{ default 1; /ready 0; /health 0; }}
    access_log {log} line if=$is_logged;
    server_tokens off;
    default_type application/octet-stream;
    client_body_temp_path {tmp_dir}/edge-bodies;
    proxy_temp_path {tmp_dir}/edge-proxy;
    fastcgi_temp_path {tmp_dir}/edge-fastcgi;
    uwsgi_temp_path {tmp_dir}/edge-uwsgi;
    scgi_temp_path {tmp_dir}/edge-scgi;
{keys}{upstream}
    server {{
        listen {listen} backlog=1024 so_keepalive=60s:10s:6;
        keepalive_timeout 0;
        client_header_timeout 30s;
        client_body_timeout 60s;
        send_timeout 60s;
        tcp_nodelay on;
        client_max_body_size {max_body_bytes};
        client_body_buffer_size 1m;
        large_client_header_buffers 8 16k;
        merge_slashes off;
{errors}
        location = /metrics {{ {no_metrics} }}
        location = /ready {{ {passed} }}
        location / {{ {key_check}{passed} }}
    }}
{metrics}}}
"""

_METRICS = """\
    server {{
        listen {listen};
        access_log off;
        location = /metrics {{ default_type "{content_type}"; alias {run_dir}/metrics; }}
        location / {{ return 404; }}
    }}
"""

_UPSTREAM = """\
    upstream proxies {{
        zone proxies 256k;
        least_conn;
{servers}
        keepalive 64;
    }}
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $host;
    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    proxy_buffering off;
    proxy_buffer_size 16k;
    proxy_buffers 8 16k;
    proxy_request_buffering on;
    proxy_connect_timeout {connect_timeout_s}s;
    proxy_read_timeout {read_timeout_s}s;
    proxy_send_timeout 60s;
    proxy_socket_keepalive on;
    proxy_next_upstream error timeout invalid_header http_503 non_idempotent;
    proxy_next_upstream_tries {tries};
"""


def nginx_config(
    config: EdgeConfig, proxies: Sequence[Address], *, probe_key: str, num_files: int, log: str = "/dev/stdout"
) -> str:
    """`num_files`: what a process may open, two for each request; `probe_key`: a further key, of the health check."""
    return _TEMPLATE.format(
        num_processes=config.num_processes,
        num_files=num_files,
        num_connections=num_files // 2,
        generation_s=EDGE_GENERATION_S,
        run_dir=config.run_dir,
        tmp_dir=config.tmp_dir,
        log=log,
        keys=_key_map(config.api_keys, probe_key),
        upstream=_upstream(proxies),
        listen=config.listen,
        max_body_bytes=MAX_BODY_BYTES,
        errors=_error_pages(),
        no_metrics=_NO_METRICS.returned,
        key_check=f"if ($has_key = 0) {{ rewrite ^ {_OWN}/401 last; }} " if config.api_keys else "",
        metrics=_metrics(config),
        passed="proxy_pass http://proxies;" if proxies else _NO_PROXY.returned,
    )


def _metrics(config: EdgeConfig) -> str:
    """What the supervisor writes of the edge, where it is asked for."""
    if config.metrics_listen is None:
        return ""
    return _METRICS.format(listen=config.metrics_listen, content_type=CONTENT_TYPE, run_dir=config.run_dir)


def _upstream(proxies: Sequence[Address]) -> str:
    """Not a word where there is no proxy: nginx takes no empty list."""
    if not proxies:
        return ""
    # max_fails=0: that a proxy has no worker for one model says nothing about the next request, for another one.
    servers = "\n".join(f"        server {address} max_fails=0;" for address in proxies)
    return _UPSTREAM.format(
        servers=servers,
        connect_timeout_s=EDGE_CONNECT_TIMEOUT_S,
        read_timeout_s=EDGE_READ_TIMEOUT_S,
        tries=EDGE_TRIES,
    )


def _key_map(keys: Sequence[str], probe_key: str) -> str:
    """Regular expressions, since plain strings of a map are compared without regard to case. A preflight has no key."""
    if not keys:
        return ""
    lines = [f'        "~^[Bb]earer +{re.escape(key)}$" 1;' for key in (*keys, probe_key)]
    return "\n".join(
        [
            "    map $http_authorization $knows_key {",
            "        default 0;",
            *lines,
            "    }",
            "    map $request_method $has_key { default $knows_key; OPTIONS 1; }",
            '    proxy_set_header Authorization "";',
            "",
        ]
    )


def _error_pages() -> str:
    answers = {**_ERRORS, 401: _UNAUTHORIZED}
    lines = [f"        error_page {status} = {_OWN}/{status};" for status in _ERRORS]
    lines += [
        f"        location = {_OWN}/{status} {{ internal; {answer.returned} }}" for status, answer in answers.items()
    ]
    return "\n".join(lines)
