"""Rows as text."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.simulation.cells import Row

_COLUMNS = (
    "trace",
    "policy",
    "workers",
    "capacity",
    "load",
    "hit rate",
    "TTFT mean s",
    "p50 s",
    "p90 s",
    "p99 s",
    "imbalance",
    "busy",
)


def table(rows: Sequence[Row]) -> str:
    """Lines with aligned columns, the head first."""
    lines = [_COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    cell, outcome = row.cell, row.outcome
    return (
        cell.trace.name,
        cell.policy,
        str(cell.scenario.num_workers),
        f"{cell.capacity:.3f}",
        "" if cell.load is None else f"{cell.load:.2f}",
        f"{outcome.hit_rate:.3f}",
        f"{outcome.ttft_mean_s:.2f}",
        f"{outcome.ttft_p50_s:.2f}",
        f"{outcome.ttft_p90_s:.1f}",
        f"{outcome.ttft_p99_s:.1f}",
        f"{outcome.imbalance:.2f}",
        f"{outcome.utilisation:.2f}",
    )
