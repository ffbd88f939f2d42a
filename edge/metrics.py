"""What the edge exports of itself, in Prometheus' text format: a file that nginx serves on a port of its own."""

from __future__ import annotations

from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4"
_PREFIX = "prefixcache_edge_"


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeMetrics:
    num_known: int
    """Addresses that the names of the proxies have."""
    num_ready: int
    num_lost: int
    num_reloads: int
    looked_at: float
    """time.time() of the last look."""

    @property
    def text(self) -> str:
        values = (
            ("proxies_known", "gauge", "Addresses that the names of the proxies have", self.num_known),
            ("proxies_ready", "gauge", "Those of them that say they are ready", self.num_ready),
            ("proxies_lost_total", "counter", "Ready ones that went without having said so first", self.num_lost),
            ("reloads_total", "counter", "Lists of proxies that nginx was given since it started", self.num_reloads),
            ("looked_timestamp_seconds", "gauge", "When they were last looked at", self.looked_at),
        )
        return "".join(
            f"# HELP {_PREFIX}{name} {told}\n# TYPE {_PREFIX}{name} {kind}\n{_PREFIX}{name} {value}\n"
            for name, kind, told, value in values
        )
