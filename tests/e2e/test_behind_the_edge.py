"""Every part but the edge is restarted under load behind a real nginx: no client sees anything of it."""

from __future__ import annotations

from pathlib import Path

from prefixcache.limits import EDGE_LOOK_S, EDGE_READY_TIMEOUT_S
from tests.e2e.test_rolling_restart import NUM_CLIENTS, NUM_WORKERS, loaded, restarted
from tests.support.edge import needs_nginx, running_edge
from tests.support.own_server import running_valkey
from tests.support.ports import free_port
from tests.support.program_fleet import Program, all_connected, all_ready, running_fleet
from tests.support.retrying_load import RetryingLoad
from tests.support.seeds import seeded
from tests.support.waiting import eventually

pytestmark = needs_nginx
DELAY_S = EDGE_LOOK_S + EDGE_READY_TIMEOUT_S
"""As in docker-compose.yml: the edge has looked before a proxy refuses anybody."""


def port_of(proxy: Program) -> int:
    return int(proxy.url.rpartition(":")[2])


async def test_a_rolling_restart_is_not_seen_by_a_client_that_never_asks_twice(tmp_path: Path) -> None:
    async with running_valkey(tmp_path) as redis, running_fleet(tmp_path, redis.url) as fleet:
        workers = [fleet.start_worker(f"w{number}") for number in range(NUM_WORKERS)]
        proxies = [
            await fleet.start_proxy(f"p{number}", "--port", str(free_port()), "--drain-delay", str(DELAY_S))
            for number in range(2)
        ]
        await all_connected(workers, proxies)
        ports = [port_of(proxy) for proxy in proxies]
        async with running_edge(tmp_path, ports) as edge:
            await edge.lists_only(*ports)
            load = RetryingLoad([edge.url], seeded("rolling restart behind the edge"))
            async with loaded(load):
                workers[0] = await restarted(fleet, workers[0])
                await workers[0].said(" ready at ")
                for number, proxy in enumerate(proxies):
                    again = await restarted(fleet, proxy)
                    await again.said(r"listening http://\S+\n")
                    again.url, proxies[number] = proxy.url, again
                    await all_ready(again, NUM_WORKERS)
                    await edge.lists_only(*ports)
                answered = sum(load.answered.values())
                await eventually(lambda: sum(load.answered.values()) >= answered + 2 * NUM_CLIENTS, 60.0)
            print(f"answered {dict(load.answered)}, lists {edge.lists()}")
            assert not load.retried, "nobody was refused, or lost a connection"
            assert edge.metric("proxies_lost_total") == 0, "who takes leave is not missed"
            assert min(load.answered["stream"], load.answered["whole"]) > NUM_CLIENTS
