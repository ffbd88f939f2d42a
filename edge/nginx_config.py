"""The text of nginx's configuration, for one list of proxies.

What it promises:
- A request goes to the proxy with the fewest, and to another one if that fails before the first byte of its answer;
  what has begun is never repeated. A stream whose proxy vanished is cut, so that nobody takes it for a whole answer.
- Bytes pass on as they come, in both directions of a stream; a body is held until it is complete, as a retry needs it.
- Every connection of a client ends with its answer. nginx closes those that wait for a next request whenever it takes a
  new list, and a request that was on its way would be lost.
- Who shows no key is answered by his head alone: no body is read, and nothing is passed on. What passes without one are
  /ready, by this very path whatever was written for it, and preflights. No more requests are in hand, and no larger
  bodies in memory, than `capacity.py` says.
- What the edge says itself has the shape of OpenAI's errors. Where no proxy answers it is 503 and Retry-After, not 502.
- No line of a log holds a query or a body.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from edge.address import Address
from edge.capacity import Capacity
from edge.config import EdgeConfig
from edge.metrics import CONTENT_TYPE
from edge.own_answers import NO_METRICS, NO_PROXY, locations, sent_to
from prefixcache.limits import (
    EDGE_ANSWER_BUFFER_BYTES,
    EDGE_BODY_BUFFER_BYTES,
    EDGE_CONNECT_TIMEOUT_S,
    EDGE_GENERATION_S,
    EDGE_HEADER_BUFFERS,
    EDGE_HEADER_TIMEOUT_S,
    EDGE_READ_TIMEOUT_S,
    EDGE_TRIES,
    MAX_BODY_BYTES,
    MAX_HEADER_LINE_BYTES,
)

_TEMPLATE = """\
worker_processes {num_processes};
worker_rlimit_nofile {num_files};
worker_shutdown_timeout {generation_s}s;
daemon off;
pid {run_dir}/nginx.pid;
error_log stderr error;
events {{ worker_connections {num_connections}; }}
http {{
    log_format line '$time_iso8601 $remote_addr $method $path $status bytes=$body_bytes_sent '
                    'seconds=$request_time proxy="$upstream_addr" proxy_status="$upstream_status" '
                    'id="$sent_http_x_request_id"';
    map $request $method {{ default -; ~^([A-Z]+)\\s $1; }}
    map $request_uri $path {{ default -; ~^([^?#]+) $1; }}
    map $path $is_logged {{ default 1; /ready 0; /health 0; }}
    access_log {log} line if=$is_logged;
    server_tokens off;
    default_type application/octet-stream;
    client_body_temp_path {tmp_dir}/edge-bodies;
    proxy_temp_path {tmp_dir}/edge-proxy;
    fastcgi_temp_path {tmp_dir}/edge-fastcgi;
    uwsgi_temp_path {tmp_dir}/edge-uwsgi;
    scgi_temp_path {tmp_dir}/edge-scgi;
    map $http_content_length:$http_transfer_encoding $has_body {{ default 1; : 0; 0: 0; }}
    map $request_method $only_asks {{ default 0; GET 1; HEAD 1; }}
{keys}{upstream}
    limit_conn_zone all zone={in_hand}:32k;
    limit_conn_status 429;
    limit_conn_log_level info;
    server {{
        # Each process has a queue of its own for new clients, so that none of them takes them all.
        listen {listen} backlog=1024 so_keepalive=60s:10s:6 reuseport;
        keepalive_timeout 0;
        client_header_timeout {header_timeout_s}s;
        client_body_timeout 60s;
        send_timeout 60s;
        tcp_nodelay on;
        sendfile on;
        client_max_body_size {max_body_bytes};
        client_body_buffer_size {body_buffer_bytes};
        large_client_header_buffers {num_header_buffers} {header_line_bytes};
        merge_slashes off;
{own_answers}
        location = /metrics {{ {no_metrics} }}
        location = /ready {{
            if ($only_asks = 0) {{ {only_get} }}
            if ($has_body) {{ {no_body} }}
            set $args "";
            {ready}
        }}
        location / {{
            {key_check}limit_conn {in_hand} {num_requests};
            {passed}
        }}
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
    proxy_buffer_size {answer_buffer_bytes};
    proxy_buffers 8 {answer_buffer_bytes};
    proxy_request_buffering on;
    proxy_connect_timeout {connect_timeout_s}s;
    proxy_read_timeout {read_timeout_s}s;
    proxy_send_timeout 60s;
    proxy_socket_keepalive on;
    proxy_next_upstream error timeout invalid_header http_503 non_idempotent;
    proxy_next_upstream_tries {tries};
"""


def nginx_config(
    config: EdgeConfig,
    proxies: Sequence[Address],
    room: Capacity,
    num_crashes: int = 0,
    *,
    probe_key: str,
    log: str = "/dev/stdout",
) -> str:
    """`num_crashes`: processes that fell. What they had in hand stays counted: after each the count begins anew.

    `probe_key`: a further key, of the health check.
    """
    return _TEMPLATE.format(
        num_processes=room.num_processes,
        num_files=room.num_files,
        num_connections=room.num_connections,
        num_requests=room.num_requests,
        in_hand=f"in_hand_{num_crashes}",
        generation_s=EDGE_GENERATION_S,
        run_dir=config.run_dir,
        tmp_dir=config.tmp_dir,
        log=log,
        keys=_key_map(config.api_keys, probe_key),
        upstream=_upstream(proxies),
        listen=config.listen,
        header_timeout_s=EDGE_HEADER_TIMEOUT_S,
        max_body_bytes=MAX_BODY_BYTES,
        body_buffer_bytes=EDGE_BODY_BUFFER_BYTES,
        num_header_buffers=EDGE_HEADER_BUFFERS,
        header_line_bytes=MAX_HEADER_LINE_BYTES,
        own_answers=locations(),
        no_metrics=NO_METRICS.directives,
        only_get=sent_to("only-get"),
        no_body=sent_to("no-body"),
        key_check=f"if ($has_key = 0) {{ {sent_to('no-key')} }}\n            " if config.api_keys else "",
        metrics=_metrics(config),
        passed="proxy_pass http://proxies;" if proxies else NO_PROXY.directives,
        ready="proxy_pass http://proxies/ready;" if proxies else NO_PROXY.directives,
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
        answer_buffer_bytes=EDGE_ANSWER_BUFFER_BYTES,
    )


def _key_map(keys: Sequence[str], probe_key: str) -> str:
    """Regular expressions, since plain strings of a map are compared without regard to case. No key holds a comma.

    Clients of OpenAI's API show a key in one header, those of Anthropic's in the other. A browser's preflight has
    neither a key nor a body.
    """
    if not keys:
        return ""
    literal = map(re.escape, (*keys, probe_key))
    lines = [f'        "~^[ \\t]*(?i:bearer)[ \\t]+{key}[ \\t]*,|,[ \\t]*{key}[ \\t]*$" 1;' for key in literal]
    return "\n".join(
        [
            "    map $http_authorization,$http_x_api_key $knows_key {",
            "        default 0;",
            *lines,
            "    }",
            "    map $request_method:$has_body:$http_access_control_request_method:$http_origin $has_key {",
            "        default $knows_key;",
            '        "~^OPTIONS:0:[A-Z]+:." 1;',
            "    }",
            '    proxy_set_header Authorization "";',
            '    proxy_set_header X-Api-Key "";',
            "",
        ]
    )
