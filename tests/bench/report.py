"""What every benchmark prints and writes: tables, .bench/<name>.json, and a verdict on its floors."""

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
class Table:
    """Rows that share their columns; a column that a row lacks stays empty."""

    title: str
    rows: Sequence[Mapping[str, object]]

    def show(self) -> None:
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        cells = [[_shown(row.get(column, "")) for column in columns] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        print(f"\n{self.title}")
        for line in (columns, *cells):
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A figure that must not be above `most`."""

    what: str
    value: float
    most: float
    very_good: float | None = None
    """Nor, at best, above this."""

    @property
    def held(self) -> bool:
        return self.value <= self.most

    @property
    def verdict(self) -> str:
        if not self.held:
            return "MISSED"
        return "held, very good" if self.very_good is not None and self.value <= self.very_good else "held"


def report(
    name: str,
    tables: Sequence[Table],
    floors: Sequence[Floor],
    *,
    about: Mapping[str, object] | None = None,
    judged: bool = True,
) -> None:
    """Writes what was shown and prints the verdicts; exits with 1 where a floor is missed, if they are `judged`."""
    print()
    for floor in floors:
        aim = f"at most {_shown(float(floor.most))}"
        if floor.very_good is not None:
            aim += f", very good {_shown(float(floor.very_good))}"
        print(f"{floor.what}: {_shown(float(floor.value))} ({aim}): {floor.verdict}")
    FOLDER.mkdir(exist_ok=True)
    content = {
        "bench": name,
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        **(about or {}),
        "tables": [asdict(table) for table in tables],
        "floors": [{**asdict(floor), "held": floor.held} for floor in floors],
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    if judged and not all(floor.held for floor in floors):
        sys.exit(1)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " / ".join(map(_shown, value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)
