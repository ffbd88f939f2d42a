"""How often the proxies are looked at, in a time that goes on only where somebody waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from edge.address import Address
from edge.capacity import capacity
from edge.config import Name, read_config
from edge.nginx import Nginx
from edge.resolver import Resolver
from edge.roster import Saying, Word
from edge.supervisor import Supervisor
from prefixcache.limits import EDGE_LOOK_S, EDGE_READY_TIMEOUT_S

HUNG, LEAVING = (Address(f"10.0.0.{number}", 8000) for number in (1, 2))
DRAIN_DELAY_S = 2.0


class Waiting(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer as soon as nothing else is to be done."""

    now_s = 0.0
    _ready: Any
    _scheduled: Any

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


class IdleNginx(Nginx):
    async def start(self, config: str) -> None:
        self.told_to_end = asyncio.Event()

    def reload(self, config: str) -> None: ...

    async def ended(self) -> int:
        await self.told_to_end.wait()
        return 0

    async def stop(self, *, grace_s: float) -> None:
        self.told_to_end.set()


async def _num_lost(folder: Path, told_at_s: float) -> int:
    """After `LEAVING` has taken leave, beside another one that never says a word."""
    loop = asyncio.get_running_loop()

    async def lookup(_name: Name) -> frozenset[Address]:
        await asyncio.sleep(EDGE_LOOK_S / 2)
        return frozenset({HUNG, LEAVING})

    async def ask(address: Address) -> Saying:
        if address == HUNG:
            await asyncio.sleep(EDGE_READY_TIMEOUT_S)
            return Saying(Word.SILENT)
        left_s = loop.time() - told_at_s
        return Saying(Word.READY if left_s < 0 else Word.NOT_READY if left_s < DRAIN_DELAY_S else Word.REFUSED)

    config = read_config({"EDGE_PROXIES": "proxy:8000", "EDGE_RUN_DIR": str(folder)})
    supervisor = Supervisor(
        config=config,
        room=capacity(num_clients=10, num_processes=1, num_files=10_000),
        resolver=Resolver(config.proxies, lookup),
        nginx=IdleNginx("nginx", folder),
        ask=ask,
    )
    told_to_end = asyncio.Event()
    running = asyncio.create_task(supervisor.run(told_to_end))
    await asyncio.sleep(told_at_s + DRAIN_DELAY_S + 5.0)
    told_to_end.set()
    assert await running == 0
    assert supervisor.listed == (HUNG, LEAVING), "nobody is ready any more"
    return supervisor.roster.num_lost


@pytest.mark.parametrize("told_at_s", [5.0 + tenths / 10 for tenths in range(30)])
def test_a_leave_is_seen_beside_one_that_is_silent(told_at_s: float, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=Waiting) as runner:
        assert runner.run(_num_lost(tmp_path, told_at_s)) == 0
