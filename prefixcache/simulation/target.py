"""How many workers a trace needs: the fewest with which the times to the first token are as short as wanted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from prefixcache.errors import ConfigError
from prefixcache.simulation.cells import Row

_FORM = re.compile(r"(mean|p50|p90|p99|max)\s*<=\s*([0-9]*\.?[0-9]+)\s*(ms|s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound on the times to the first token."""

    figure: str
    most_s: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises ConfigError for what is not like `p99<=2s`."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is no target; it must be like p99<=2s, of mean, p50, p90, p99 or max, in s or ms"
            )
        figure, number, unit = match.groups()
        return cls(figure=figure, most_s=float(number) / (1000 if unit == "ms" else 1))

    def __str__(self) -> str:
        return f"{self.figure} <= {self.most_s:g} s"

    def value_s(self, row: Row) -> float:
        value: float = getattr(row.outcome, f"ttft_{self.figure}_s")
        return value

    def is_met(self, row: Row) -> bool:
        return self.value_s(row) <= self.most_s


def fewest_workers(run: Callable[[int], Row], target: Target, *, least: int, most: int) -> tuple[Row | None, list[Row]]:
    """The row that meets the target with the fewest workers, None if that many are not enough; and all that were run.

    More workers are taken to do no harm, so that few of the numbers need be run: twice as many each time until the
    target is met, then halves of what is between.
    """
    rows: dict[int, Row] = {}

    def is_enough(num_workers: int) -> bool:
        rows[num_workers] = run(num_workers)
        return target.is_met(rows[num_workers])

    too_few, enough = least - 1, least
    while not is_enough(enough):
        if enough == most:
            return None, [rows[number] for number in sorted(rows)]
        too_few, enough = enough, min(2 * enough, most)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return rows[enough], [rows[number] for number in sorted(rows)]
