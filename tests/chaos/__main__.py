"""`python -m tests.chaos --minutes 10`: prints its tables, writes .bench/chaos.json, exits with 1 for any failure."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from tests.bench.report import Floor, report
from tests.chaos.run import run
from tests.support.seeds import seeded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", help="of an earlier run, as it was printed")
    parser.add_argument("--logs", type=Path, help="folder for the programs' logs, which are kept then")
    given = parser.parse_args()
    if given.seed is not None:
        os.environ["TEST_SEED"] = given.seed
    random = seeded("chaos")
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder: Path = given.logs or Path(scratch)
        folder.mkdir(exist_ok=True, parents=True)
        found = asyncio.run(run(folder, random, seconds=60 * given.minutes))
    tables = found.tables()
    for table in tables:
        table.show()
    for failure in found.tally.failures:
        print(f"FAILURE {failure}", file=sys.stderr)
    for problem in found.problems:
        print(f"LEFT BEHIND {problem}", file=sys.stderr)
    report(
        "chaos",
        tables,
        [
            Floor(what="responses that are lost, wrong, cut or not allowed", value=len(found.tally.failures), most=0),
            Floor(what="things left behind", value=len(found.problems), most=0),
        ],
        about={"minutes": given.minutes},
    )


if __name__ == "__main__":
    main()
