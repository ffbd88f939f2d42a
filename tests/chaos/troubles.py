"""What goes wrong: one trouble after the other, each with its victim, healed at its end.

                                     the victim, for a random time
    worker  kill -9                  is gone, and started again
            SIGSTOP                  stands still, up to three times as long as a proxy has patience
            SIGTERM                  drains, hands the rest over, and is started again
    proxy   kill -9, SIGSTOP, SIGTERM
    Redis   SIGSTOP, kill -9 (comes back empty), FLUSHALL
    all workers at once              killed

Of the proxies, one is always left alone: behind a balancer there is somebody who takes the request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from random import Random

from tests.chaos.deployment import Deployment, Part

MEAN_PAUSE_S = 3.0
REDIS_PAUSES_S = (0.2, 5.0)
WORKER_STOPS_S = (0.3, 7.0)
PROXY_STOPS_S = (0.3, 3.0)
DEAD_S = (0.1, 2.0)


class Troubles:
    """Makes trouble until told to stop; every trouble that began is healed first."""

    def __init__(self, deployment: Deployment, random: Random) -> None:
        self._deployment = deployment
        self._random = random
        self._stopping = asyncio.Event()
        self.made: Counter[str] = Counter()
        self.log: list[tuple[float, str]] = []
        """When each began, by time.monotonic()."""
        self._kinds: Mapping[str, tuple[float, Callable[[], Awaitable[None]]]] = {
            "a worker is killed": (4, self._kill_worker),
            "a worker stands still": (3, self._stop_worker),
            "a worker is restarted": (3, self._restart_worker),
            "all workers are killed": (0.5, self._kill_all_workers),
            "a proxy is killed": (1.5, self._kill_proxy),
            "a proxy stands still": (1.5, self._stop_proxy),
            "a proxy is restarted": (2, self._restart_proxy),
            "Redis stands still": (2, self._stop_redis),
            "Redis is killed": (1, self._kill_redis),
            "Redis is emptied": (1, self._flush_redis),
        }

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        weights = [weight for weight, _ in self._kinds.values()]
        async with asyncio.TaskGroup() as group:
            while not self._stopping.is_set():
                [name] = self._random.choices(list(self._kinds), weights)
                group.create_task(self._make(name))
                pause_s = self._random.expovariate(1 / MEAN_PAUSE_S)
                try:
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
                except TimeoutError:
                    continue

    async def _make(self, name: str) -> None:
        self.log.append((time.monotonic(), name))
        await self._kinds[name][1]()

    def _victim(self, among: list[Part], what: str, *, spared: int = 0) -> Part | None:
        """None where all but so many are in trouble already."""
        well = [part for part in among if not part.in_trouble]
        if len(well) <= spared:
            return None
        self.made[what] += 1
        victim = self._random.choice(well)
        victim.in_trouble = True
        return victim

    async def _sleep(self, span_s: tuple[float, float]) -> None:
        await asyncio.sleep(self._random.uniform(*span_s))

    # --- workers --------------------------------------------------------------------------------------------

    async def _kill_worker(self) -> None:
        if (worker := self._victim([*self._deployment.workers], "a worker is killed")) is not None:
            await self._killed(worker)

    async def _kill_all_workers(self) -> None:
        well = [worker for worker in self._deployment.workers if not worker.in_trouble]
        if well:
            self.made["all workers are killed"] += 1
            for worker in well:
                worker.in_trouble = True
            await asyncio.gather(*map(self._killed, well))

    async def _stop_worker(self) -> None:
        if (worker := self._victim([*self._deployment.workers], "a worker stands still", spared=1)) is not None:
            with worker.stopped():
                await self._sleep(WORKER_STOPS_S)
            worker.in_trouble = False

    async def _restart_worker(self) -> None:
        if (worker := self._victim([*self._deployment.workers], "a worker is restarted", spared=1)) is not None:
            await self._restarted(worker)

    # --- proxies --------------------------------------------------------------------------------------------

    async def _kill_proxy(self) -> None:
        if (proxy := self._victim([*self._deployment.proxies], "a proxy is killed", spared=1)) is not None:
            with proxy.away():
                await self._killed(proxy)

    async def _stop_proxy(self) -> None:
        if (proxy := self._victim([*self._deployment.proxies], "a proxy stands still", spared=1)) is not None:
            with proxy.stopped():
                await self._sleep(PROXY_STOPS_S)
            proxy.in_trouble = False

    async def _restart_proxy(self) -> None:
        if (proxy := self._victim([*self._deployment.proxies], "a proxy is restarted", spared=1)) is not None:
            with proxy.away():
                await self._restarted(proxy)

    # --- Redis ----------------------------------------------------------------------------------------------

    async def _stop_redis(self) -> None:
        if self._takes_redis("Redis stands still"):
            with self._deployment.redis.paused():
                await self._sleep(REDIS_PAUSES_S)
            self._deployment.redis_in_trouble = False

    async def _kill_redis(self) -> None:
        if self._takes_redis("Redis is killed"):
            self._deployment.redis.kill()
            await self._sleep(DEAD_S)
            await self._deployment.redis.start()
            self._deployment.redis_in_trouble = False

    async def _flush_redis(self) -> None:
        if self._takes_redis("Redis is emptied"):
            await asyncio.to_thread(self._deployment.redis.flush)
            self._deployment.redis_in_trouble = False

    def _takes_redis(self, what: str) -> bool:
        if self._deployment.redis_in_trouble:
            return False
        self.made[what] += 1
        self._deployment.redis_in_trouble = True
        return True

    # --- what happens to both -------------------------------------------------------------------------------

    async def _killed(self, part: Part) -> None:
        part.kill()
        await self._sleep(DEAD_S)
        await self._deployment.back(part)
        part.in_trouble = False

    async def _restarted(self, part: Part) -> None:
        await part.program.stop()
        await self._deployment.back(part)
        part.in_trouble = False
