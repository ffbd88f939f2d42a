"""What the compose tests found, printed at the end and written to .bench/compose.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.bench.report import Floor, Table, report
from tests.compose.survival import Survived


@dataclass(slots=True, kw_only=True)
class Findings:
    """Of one session; every test adds its own."""

    image_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Image -> bytes of all of it, and of what it adds to its base."""
    healthy_after_s: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Start -> service -> seconds."""
    alerts_after_s: dict[str, float] = field(default_factory=dict)
    """Alert -> seconds from its fault until it fires."""
    survived: list[Survived] = field(default_factory=list)

    def show(self) -> None:
        """Nothing where nothing was found."""
        tables = [table for table in self._tables() if table.rows]
        for table in tables:
            table.show()
        if tables:
            problems = [problem for each in self.survived for problem in each.problems]
            for problem in problems:
                print(f"FAILURE {problem}")
            floor = Floor(
                what="requests that saw more than is allowed, hit rates not back", value=len(problems), most=0
            )
            report("compose", tables, [floor], judged=False)

    def _tables(self) -> list[Table]:
        return [
            Table(
                title="Images, MB",
                rows=[
                    {"image": image, "all": round(size / 1e6), "above its base": round(above / 1e6)}
                    for image, (size, above) in self.image_sizes.items()
                ],
            ),
            Table(
                title="Healthy after, seconds from `up`",
                rows=[{"start": start, **services} for start, services in self.healthy_after_s.items()],
            ),
            Table(
                title="Alerts fire after, seconds from the fault",
                rows=[{"alert": alert, "fires": seconds} for alert, seconds in self.alerts_after_s.items()],
            ),
            Table(
                title="Faults at 20 requests a second; hit rate: before / lowest / last, of 40 answers",
                rows=[each.row() for each in self.survived],
            ),
        ]
