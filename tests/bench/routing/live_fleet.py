"""The processes of a live run: Valkey, simulated workers, proxies and clients; what each of them takes of the cores."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import msgspec

from prefixcache.cli.children import end, spawn
from prefixcache.cli.valkey import EmbeddedValkey
from tests.bench.routing.live_load import Figures, Order
from tests.support.program_fleet import Program, all_ready, running_fleet
from tests.support.waiting import eventually
from worker.sim_costs import CostModel

ROOT = Path(__file__).resolve().parents[3]
MODEL = "sim"
START_TIMEOUT_S = 120.0
WORKER_NICENESS = 5
"""As `prefixcache up` has it: on few cores, what proxies and index do is not to wait for the steps of many workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFleet:
    """What runs."""

    workers: Sequence[Program]
    proxies: Sequence[Program]
    valkey_pid: int
    folder: Path

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each process so far."""
        programs = {program.name: program.process.pid for program in (*self.proxies, *self.workers)}
        return {name: _cpu_s(pid) for name, pid in {**programs, "valkey": self.valkey_pid}.items()}

    def num_steals(self) -> int:
        """Requests that were moved to an idle worker."""
        return sum(_moved(proxy.url) for proxy in self.proxies)


@asynccontextmanager
async def live_fleet(
    folder: Path, *, num_workers: int, num_proxies: int, num_blocks: int, costs: CostModel
) -> AsyncIterator[LiveFleet]:
    """Everything is ready when this gives it."""
    flags = [f"--num-blocks={num_blocks}", f"--model={MODEL}", *_cost_flags(costs)]
    with EmbeddedValkey() as valkey:
        async with running_fleet(folder, valkey.url) as fleet:
            start = partial(fleet.start_worker, niceness=WORKER_NICENESS)
            workers = [start(f"worker-{number}", *flags) for number in range(1, num_workers + 1)]
            for worker in workers:
                await worker.said(" ready at ", START_TIMEOUT_S)
            proxies = [await fleet.start_proxy(f"proxy-{number}") for number in range(1, num_proxies + 1)]
            for proxy in proxies:
                await all_ready(proxy, num_workers, START_TIMEOUT_S)
            yield LiveFleet(workers=workers, proxies=proxies, valkey_pid=valkey.pid, folder=folder)


async def send_load(fleet: LiveFleet, order: Order) -> tuple[Figures, Mapping[str, float]]:
    """Lets the clients send it; also gives the share of a core that each process took meanwhile."""
    path, log = fleet.folder / "order.json", fleet.folder / "clients.log"
    path.write_bytes(msgspec.json.encode(order))
    command = [sys.executable, "-m", "tests.bench.routing.live_load", str(path)]
    out = fleet.folder / "figures.json"
    with out.open("wb") as written, log.open("wb") as errors:
        clients = spawn(command, stdin=subprocess.PIPE, stdout=written, stderr=errors, cwd=ROOT)

    def is_there(lines: int) -> bool:
        assert clients.poll() in (None, 0), f"the clients ended:\n{log.read_text()[-2000:]}"
        return out.read_bytes().count(b"\n") >= lines

    try:
        await eventually(lambda: is_there(1), START_TIMEOUT_S)
        before, began_s = fleet.cpu_s(), time.perf_counter()
        assert clients.stdin is not None
        clients.stdin.write(b"go\n")
        clients.stdin.flush()
        duration_s = order.requests[-1].arrival_s
        await eventually(lambda: is_there(2), 3 * duration_s + START_TIMEOUT_S)
        after, took_s = fleet.cpu_s(), time.perf_counter() - began_s
    finally:
        await asyncio.to_thread(end, clients, patience_s=2.0)
    figures = msgspec.json.decode(out.read_bytes().split(b"\n")[1], type=Figures)
    shares = {name: (after[name] - before[name]) / took_s for name in after}
    return figures, {"clients": figures.cpu_s / figures.took_s, **shares}


def _cost_flags(costs: CostModel) -> list[str]:
    return [f"--sim-{field.name.replace('_', '-')}={getattr(costs, field.name)}" for field in fields(costs)]


def _cpu_s(pid: int) -> float:
    return time.clock_gettime(
        ~pid << 3 | 2
    )  # the clock of another process's CPU time, as clock_getcpuclockid(3) has it


def _moved(url: str) -> int:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r'^prefixcache_steals_total\{outcome="moved"\} ([0-9.e+]+)$', text, re.MULTILINE)
    return round(float(found[1])) if found is not None else 0
