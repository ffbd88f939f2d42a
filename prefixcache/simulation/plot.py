"""Percentiles of the time to the first token against load, drawn with matplotlib: an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefixcache.errors import ConfigError
from prefixcache.simulation.cells import Row

FORMATS = (".png", ".svg")
_PERCENTILES = ("p50", "p90", "p99")
_AXES = (
    ("load", "load (share of the time in which one pooled cache would be busy)"),
    ("arrival_speed", "arrivals, times those of the trace"),
    ("workers", "workers"),
    ("capacity", "cache, share of the trace's unique blocks"),
)
"""The first of them that varies is drawn to the right."""


def require_plot(path: Path) -> None:
    """Raises ConfigError unless a plot can be written there: told before anything is run."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(FORMATS)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.resolve().parent}")
    try:
        import matplotlib  # noqa: F401  # optional, and slow to import
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: install it with `pip install prefixcache[plot]`") from error


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for each trace and percentile, a line for each policy. `require_plot` has said yes."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "prefixcache"  # the same figures make the same file
    from matplotlib import pyplot

    points = [(row, row.figures()) for row in rows]
    key, label = _axis([figures for _, figures in points])
    traces = list(dict.fromkeys(figures["trace"] for _, figures in points))
    figure, panels = pyplot.subplots(
        len(traces), len(_PERCENTILES), figsize=(4.2 * len(_PERCENTILES), 3.4 * len(traces)), squeeze=False
    )
    for panel_row, trace in zip(panels, traces, strict=True):
        of_trace = [figures for _, figures in points if figures["trace"] == trace]
        for panel, percentile in zip(panel_row, _PERCENTILES, strict=True):
            for policy in dict.fromkeys(figures["policy"] for figures in of_trace):
                line = sorted(
                    (figures[key], figures[f"ttft_{percentile}_s"])
                    for figures in of_trace
                    if figures["policy"] == policy
                )
                panel.plot(*zip(*line, strict=True), marker="o", markersize=3, label=policy)
            panel.set_title(f"{trace}, {percentile}", fontsize=9)
            panel.set_xlabel(label, fontsize=7)
            panel.set_ylabel("time to first token, s", fontsize=8)
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
            panel.grid(visible=True, alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    pyplot.close(figure)


def _axis(points: Sequence[dict[str, Any]]) -> tuple[str, str]:
    for key, label in _AXES:
        if len({figures[key] for figures in points}) > 1:
            return key, label
    return _AXES[0] if points[0]["load"] is not None else _AXES[1]
