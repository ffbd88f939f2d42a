"""One run of chaos, from a deployment that is whole to one that is whole again, and what there is to say of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.bench.report import Table
from tests.chaos.audit import Size, audit, sizes
from tests.chaos.deployment import Deployment, deployed
from tests.chaos.load import Load
from tests.chaos.tally import Tally
from tests.chaos.troubles import Troubles

LONG_GAP_S = 4.0
BEFORE_S = 8.0
WARM_S = 3.0
"""Load without trouble, at the beginning and at the end."""

_IN_LOGS = {
    "went on on another worker at once": "goes on at worker",
    "waited for a worker first": "waits for a worker",
    "given up": "given up",
    "streams cut as a worker hung": "its stream is cut",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What happened."""

    tally: Tally
    troubles: Troubles
    seams: Counter[str]
    """What proxies logged of generations that lost their worker."""
    at_first: Mapping[str, Size]
    at_last: Mapping[str, Size]
    problems: list[str] = field(default_factory=list)
    """What was left behind."""

    def tables(self) -> Sequence[Table]:
        gaps = sorted(gap_s for gap_s, _ in self.tally.longest_gaps) or [0.0]
        shares = {"half": 0.5, "nine in ten": 0.9, "99 in 100": 0.99, "all": 1.0}
        return [
            Table(title="Every response", rows=self.tally.rows()),
            Table(
                title="Troubles",
                rows=[{"what": what, "times": times} for what, times in self.troubles.made.most_common()],
            ),
            Table(title="Why not simply answered", rows=_counted(self.tally.reasons)),
            Table(title="Asked again of the next proxy", rows=_counted(self.tally.asked_again)),
            Table(title="Generations that lost their worker, by the proxies' logs", rows=_counted(self.seams)),
            Table(
                title="Longest gap in a stream, seconds",
                rows=[{name: gaps[min(int(share * len(gaps)), len(gaps) - 1)] for name, share in shares.items()}],
            ),
            Table(title=f"Gaps above {LONG_GAP_S:g} s, and the troubles that had begun", rows=self._long_gaps()),
            Table(
                title="Processes, at first and at last",
                rows=[
                    {
                        "part": name,
                        "descriptors": (size.num_descriptors, self.at_last[name].num_descriptors),
                        "MiB": (size.resident_bytes >> 20, self.at_last[name].resident_bytes >> 20),
                    }
                    for name, size in self.at_first.items()
                ],
            ),
        ]

    def _long_gaps(self) -> list[Mapping[str, object]]:
        """The longest one of those that began together."""
        found: dict[int, tuple[float, float]] = {}
        for gap_s, began_at in self.tally.longest_gaps:
            if gap_s > LONG_GAP_S:
                found[round(began_at)] = max(found.get(round(began_at), (0.0, 0.0)), (gap_s, began_at))
        return [
            {
                "seconds": gap_s,
                "troubles": "; ".join(
                    f"{at - began_at:+.1f} s {what}"
                    for at, what in self.troubles.log
                    if began_at - BEFORE_S <= at <= began_at + gap_s
                ),
            }
            for gap_s, began_at in sorted(found.values(), key=lambda gap: gap[1])
        ]


def _counted(counter: Counter[str]) -> list[Mapping[str, object]]:
    return [{"times": times, "what": what} for what, times in counter.most_common()]


async def run(folder: Path, random: Random, *, seconds: float) -> Report:
    """The report says what is left behind, and which program logged a traceback."""
    report: Report | None = None
    try:
        async with deployed(folder) as deployment:
            report = await _made(deployment, random, seconds=seconds)
    except AssertionError as error:
        if report is None:
            raise
        report.problems.append(str(error))
    assert report is not None
    return report


async def _made(deployment: Deployment, random: Random, *, seconds: float) -> Report:
    at_first = sizes(deployment)
    load = Load(deployment, Random(random.random()))
    troubles = Troubles(deployment, Random(random.random()))
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await asyncio.sleep(WARM_S)
        making = group.create_task(troubles.run())
        await asyncio.sleep(max(0.0, seconds - 2 * WARM_S))
        troubles.stop()
        await making
        await deployment.whole()
        healed_at = time.time()
        await asyncio.sleep(WARM_S)
        load.stop()
    report = Report(
        tally=load.tally,
        troubles=troubles,
        seams=_seams(deployment),
        at_first=at_first,
        at_last=sizes(deployment),
    )
    report.problems.extend(await audit(deployment, at_first, healed_at=healed_at))
    return report


def _seams(deployment: Deployment) -> Counter[str]:
    logs = "".join(program.log.read_text() for program in deployment.fleet.programs)
    return Counter({what: len(re.findall(words, logs)) for what, words in _IN_LOGS.items()})
