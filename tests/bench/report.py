"""What every benchmark prints and writes: a table, .bench/<name>.json, and a verdict on its floors."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(".bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A figure that must not be above `most`."""

    what: str
    value: float
    most: float

    @property
    def held(self) -> bool:
        return self.value <= self.most


def report(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, object]], floors: Sequence[Floor]) -> None:
    """Prints and writes the result; exits with 1 where a floor is missed."""
    widths = [max(len(column), *(len(_shown(row[column])) for row in rows)) for column in columns]
    print("  ".join(column.rjust(width) for column, width in zip(columns, widths, strict=True)))
    for row in rows:
        print("  ".join(_shown(row[column]).rjust(width) for column, width in zip(columns, widths, strict=True)))
    for floor in floors:
        verdict = "held" if floor.held else "MISSED"
        print(f"{floor.what}: {floor.value:.3f} (at most {floor.most:.3f}): {verdict}")
    FOLDER.mkdir(exist_ok=True)
    content = {
        "bench": name,
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "rows": list(rows),
        "floors": [{**asdict(floor), "held": floor.held} for floor in floors],
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    if not all(floor.held for floor in floors):
        sys.exit(1)


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
