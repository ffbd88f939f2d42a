"""A minute of chaos; CHAOS_SECONDS for another time. `make chaos` makes ten minutes of it."""

from __future__ import annotations

import os
from pathlib import Path

from tests.chaos.load import ANSWERABLE
from tests.chaos.run import run
from tests.chaos.tally import Outcome
from tests.support.seeds import seeded

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
LEAST_RIGHT = 0.9
"""Of what could be answered; the rest is told, for its proxy or all workers were gone."""


async def test_every_response_is_accounted_for(tmp_path: Path) -> None:
    report = await run(tmp_path, seeded("chaos"), seconds=SECONDS)
    for table in report.tables():
        table.show()
    assert report.tally.failures == []
    assert report.problems == []
    assert report.tally.share(Outcome.RIGHT, ANSWERABLE) >= LEAST_RIGHT
    assert sum(report.seams.values()) > 0, "workers were lost while they had something to do"
