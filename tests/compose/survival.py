"""One fault after the other under steady load, and what clients saw of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from tests.compose.account import Account, Outcome
from tests.compose.client import ANSWER_TIMEOUT_S
from tests.compose.faults import Fault
from tests.compose.load import SteadyLoad
from tests.compose.recovery import WINDOW, Recovery, hit_rate, recovery
from tests.support.compose import ComposeStack
from tests.support.containers import Container
from tests.support.waiting import eventually

WHOLE_TIMEOUT_S = 60.0
BACK_WITHIN_S = 60.0
"""Of the hit rate, from the beginning of the fault."""
LOOK_EVERY_S = 0.3
LOOK_TIMEOUT_S = 5.0

_WORKERS_READY = (
    "import json, urllib.request as r; "
    "print(sum(w['ready'] for w in json.load(r.urlopen('http://127.0.0.1:8000/health', timeout=5))['workers']))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survived:
    """What one fault did; seconds from its beginning. TTFT and gaps are those of streams, continued ones too."""

    fault: Fault
    accounts: Sequence[Account]
    """Of the requests that ended between its beginning and that of the next one."""
    whole_s: float
    """Until everything was healthy again, and every proxy had every worker."""
    recovery: Recovery

    @property
    def problems(self) -> list[str]:
        """Everything that is worse than is allowed."""
        found = self.fault.allowance.broken_by(self.accounts)
        if not self.recovery.is_back or self.recovery.low_until_s > BACK_WITHIN_S:
            found.append(f"the hit rate is not back: {self.recovery}")
        return [f"{self.fault.name}: {problem}" for problem in found]

    def row(self) -> Mapping[str, object]:
        outcomes = [account.outcome for account in self.accounts]
        streams = [account for account in self.accounts if account.is_stream]
        return {
            "fault": self.fault.name,
            "requests": len(self.accounts),
            **{str(outcome): outcomes.count(outcome) for outcome in Outcome},
            "client asked again": sum(bool(account.failed_attempts) for account in self.accounts),
            "longest TTFT s": round(max((account.first_token_s for account in streams), default=0.0), 1),
            "longest gap s": round(max((account.longest_gap_s for account in streams), default=0.0), 1),
            "whole after s": round(self.whole_s, 1),
            "hit rate": (self.recovery.before, self.recovery.lowest, self.recovery.last),
            "low until s": round(self.recovery.low_until_s, 1),
        }


class Survival:
    """Of a stack under a load that runs."""

    def __init__(self, stack: ComposeStack, load: SteadyLoad) -> None:
        self._stack = stack
        self._load = load
        self._before = 0.0
        self.survived: list[Survived] = []

    async def undergo(self, fault: Fault) -> Survived:
        """Returns when all is as before, or has not become so in time."""
        right = [each for each in self._load.accounts if each.outcome is Outcome.RIGHT]
        # Of the last fault some of the fall may be left: what was reached once is to be reached again.
        self._before = before = max(self._before, hit_rate(right[-2 * WINDOW :]))
        began_at = time.monotonic()
        take_back = await asyncio.to_thread(fault.begin, self._stack, self._load.busiest_worker())
        await asyncio.sleep(fault.lasts_s)
        await asyncio.to_thread(take_back)
        healed_at = time.monotonic()
        await whole(self._stack)
        whole_at = time.monotonic()
        whole_s = whole_at - began_at

        def looked() -> Recovery:
            return recovery(self._load.since(began_at), before=before, began_at=began_at, healed_at=healed_at)

        with contextlib.suppress(AssertionError):
            # What the fault held up comes first: a miss takes longer than a hit, so a whole window of hits that were
            # asked later may end before it, and would be judged with the misses behind it still to come.
            await eventually(lambda: self._load.is_over(whole_at), ANSWER_TIMEOUT_S)
            await eventually(lambda: looked().is_back, max(began_at + BACK_WITHIN_S - time.monotonic(), 1.0))
        survived = Survived(fault=fault, accounts=self._load.since(began_at), whole_s=whole_s, recovery=looked())
        self.survived.append(survived)
        return survived

    async def warmed_up(self) -> None:
        """Returns when the load is answered at a steady hit rate."""
        await eventually(lambda: len(self._load.accounts) >= 4 * WINDOW, WHOLE_TIMEOUT_S)


async def whole(stack: ComposeStack) -> None:
    """Returns when every container is healthy, every proxy has every worker, and the edge has a proxy that is ready."""
    deadline = time.monotonic() + WHOLE_TIMEOUT_S
    while (missing := await asyncio.to_thread(_missing, stack)) is not None:
        assert time.monotonic() < deadline, missing
        await asyncio.sleep(LOOK_EVERY_S)


def _missing(stack: ComposeStack) -> str | None:
    """What the stack lacks, None if nothing."""
    containers = stack.containers()
    for service, number in stack.scale.items():
        healthy = [each for each in containers if each.service == service and each.is_running and each.is_healthy]
        if len(healthy) != number:
            return f"{len(healthy)} of {number} {service} healthy"
    for container in containers:
        if container.service == "proxy" and (ready := _workers_ready(container)) != stack.scale["worker"]:
            return f"{container.name} has {ready} of {stack.scale['worker']} workers ready"
    return None if _is_ready(stack.url) else "the edge is not ready"


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=LOOK_TIMEOUT_S) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


def _workers_ready(proxy: Container) -> int:
    """As this proxy sees it; -1 while it does not answer."""
    try:
        return int(json.loads(proxy.execute("python", "-ISc", _WORKERS_READY)))
    except (subprocess.SubprocessError, ValueError):
        return -1
