"""`python -m edge`: nginx in front of the proxies, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys

from edge import api_keys
from edge.capacity import capacity
from edge.config import read_config
from edge.nginx import Nginx
from edge.resolver import Resolver
from edge.supervisor import Supervisor
from prefixcache.errors import ConfigError

_MOST_FILES = 65_536
_logger = logging.getLogger("edge")


def _num_files() -> int:
    """What a process of nginx may open: as many as the system lets it, within reason."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)


async def _run() -> int:
    config = read_config(os.environ)
    room = capacity(num_clients=config.num_clients, num_processes=config.num_processes, num_files=_num_files())
    _logger.log(*api_keys.told(config.api_keys, config.published))
    _logger.info("at most %d requests in hand", room.num_requests)
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
    supervisor = Supervisor(
        config=config,
        room=room,
        resolver=Resolver(config.proxies),
        nginx=Nginx(config.nginx, config.run_dir),
    )
    return await supervisor.run(told_to_end)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(_run())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
