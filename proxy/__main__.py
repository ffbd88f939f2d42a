"""`python -m proxy`: the proxy program."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import click
import uvloop

from prefixcache.config import FiniteRange, secret_option, settings_command, worker_token_option
from prefixcache.errors import ConfigError
from prefixcache.index.keys import DEFAULT_KEY_PREFIX
from prefixcache.limits import CONNECT_TIMEOUT_S, DRAIN_TIMEOUT_S, ENGINE_GAP_S
from prefixcache.local_store import LocalStore
from prefixcache.routing.policies import DEFAULT_POLICY, POLICIES
from prefixcache.store import RedisStore
from prefixcache.worker_token import check_token
from proxy.app import DEPARTURE, AppParts, create_app
from proxy.config import DEFAULT_HOST, DEFAULT_PORT, DEFAULT_REDIS_URL, ProxySettings
from proxy.cors import check_origins
from proxy.engines.engine_place import read_engine_places
from proxy.engines.engine_settings import EngineSettings
from proxy.engines.headers import read_header_names
from proxy.engines.http_pool import EngineTimeouts
from proxy.server import serving
from proxy.store import Store

_logger = logging.getLogger("proxy")


async def run(settings: ProxySettings) -> None:
    """Serves until SIGINT or SIGTERM. Raises ConfigError."""
    parts = AppParts(
        open_store=lambda: _open_store(settings),
        has_redis=settings.redis_url is not None,
        policy=POLICIES[settings.policy](random.Random()),
        secret=settings.secret,
        worker_token=settings.worker_token,
        drain_delay_s=settings.drain_delay_s,
        drain_s=settings.drain_s,
        cors_origins=settings.cors_origins,
        engines=settings.engines,
    )
    check_origins(settings.cors_origins)
    read_engine_places(settings.engines.urls)
    app = create_app(parts)
    departure = app[DEPARTURE]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, departure.tell)
    async with serving(app, departure, host=settings.host, port=settings.port) as url:
        _logger.info("listening %s", url)
        await departure.told()
        _logger.info("stopping")


def _open_store(settings: ProxySettings) -> AbstractAsyncContextManager[Store]:
    if settings.redis_url is None:
        return LocalStore.open()
    return RedisStore.open(settings.redis_url, key_prefix=settings.key_prefix)


@settings_command("proxy", help="Serve the OpenAI API in front of registered workers and plain engines.")
@click.option(
    "--redis",
    default=None,
    show_default=f"{DEFAULT_REDIS_URL}; with --engine none, for a single proxy in front of engines alone",
    help="Redis or Valkey: redis://, rediss:// or unix://.",
)
@click.option(
    "--engine",
    multiple=True,
    metavar="URL",
    help="OpenAI-compatible server to stand in front of, as http://10.0.0.5:8000; vLLM, SGLang, others. Repeatable.",
)
@click.option(
    "--tokenizer",
    default=None,
    show_default="none, prefixes are found by the bytes of the request",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the tokenizer of the model that the engines serve.",
)
@click.option(
    "--engine-capacity",
    default=None,
    show_default="ample",
    metavar="BLOCKS",
    type=click.IntRange(min=1),
    help="KV blocks of each engine whose metrics do not tell.",
)
@click.option(
    "--engine-connect-timeout",
    default=CONNECT_TIMEOUT_S,
    metavar="SECONDS",
    type=FiniteRange(min=0, min_open=True),
    help="Seconds to wait for a connection to an engine; another one is asked then.",
)
@click.option(
    "--engine-first-byte-timeout",
    default=0.0,
    show_default="0, no limit",
    metavar="SECONDS",
    type=FiniteRange(min=0),
    help="Seconds to wait for the first byte of an answer: queueing and prefill, or a whole answer that is no stream.",
)
@click.option(
    "--engine-idle-timeout",
    default=ENGINE_GAP_S,
    metavar="SECONDS",
    type=FiniteRange(min=0),
    help="Seconds between two pieces of an answer; 0: no limit. Nothing limits an answer whose bytes flow.",
)
@click.option(
    "--engine-pass-header",
    multiple=True,
    metavar="NAME",
    help="Header that passes between clients and engines, both ways, besides the known ones. Repeatable.",
)
@secret_option("engine-api-key", "Key with which engines are asked for their models; not as a flag.  [default: none]")
@click.option("--host", default=DEFAULT_HOST, help="Address to listen on.")
@click.option(
    "--port", default=DEFAULT_PORT, type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one."
)
@click.option("--policy", default=DEFAULT_POLICY, type=click.Choice(sorted(POLICIES)), help="How a worker is chosen.")
@click.option("--key-prefix", default=DEFAULT_KEY_PREFIX, help="Leading part of every Redis key of this deployment.")
@click.option(
    "--secret",
    default=None,
    show_default=False,
    help="Deployment secret of the block hashes; default: the one in Redis. Prefer the environment variable.",
)
@worker_token_option
@click.option(
    "--drain-delay",
    default=0.0,
    metavar="SECONDS",
    type=FiniteRange(min=0),
    help="Once told to end, seconds between the turn of /ready and the first refusal: until the balancer has looked.",
)
@click.option(
    "--drain-timeout",
    default=DRAIN_TIMEOUT_S,
    metavar="SECONDS",
    type=FiniteRange(min=0),
    help="Seconds for the requests in hand from then on; those that take longer are told. 0: at once.",
)
@click.option(
    "--cors-origin",
    multiple=True,
    help="Origin whose pages may call this proxy from a browser, as https://chat.example.org; * for any. Repeatable.",
)
def main(
    redis: str | None,
    engine: tuple[str, ...],
    tokenizer: Path | None,
    engine_capacity: int | None,
    engine_connect_timeout: float,
    engine_first_byte_timeout: float,
    engine_idle_timeout: float,
    engine_pass_header: tuple[str, ...],
    engine_api_key: str | None,
    host: str,
    port: int,
    policy: str,
    key_prefix: str,
    secret: str | None,
    worker_token: str | None,
    drain_delay: float,
    drain_timeout: float,
    cors_origin: tuple[str, ...],
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        settings = ProxySettings(
            redis_url=redis or (None if engine else DEFAULT_REDIS_URL),
            host=host,
            port=port,
            policy=policy,
            key_prefix=key_prefix,
            secret=os.fsencode(secret) if secret else None,
            worker_token=check_token(worker_token),
            drain_delay_s=drain_delay,
            drain_s=drain_timeout,
            cors_origins=cors_origin,
            engines=EngineSettings(
                urls=engine,
                tokenizer=tokenizer,
                capacity_blocks=engine_capacity,
                timeouts=EngineTimeouts(
                    connect_s=engine_connect_timeout,
                    first_byte_s=engine_first_byte_timeout or None,
                    gap_s=engine_idle_timeout or None,
                ),
                passed_headers=read_header_names(engine_pass_header),
                api_key=engine_api_key or None,
            ),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(settings))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
