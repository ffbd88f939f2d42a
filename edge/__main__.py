"""`python -m edge`: nginx in front of the proxies, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from edge.config import read_config
from edge.nginx import Nginx
from edge.resolver import Resolver
from edge.supervisor import Supervisor
from prefixcache.errors import ConfigError


async def _run() -> int:
    config = read_config(os.environ)
    told_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_end.set)
    supervisor = Supervisor(config=config, resolver=Resolver(config.proxies), nginx=Nginx(config.nginx, config.run_dir))
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
