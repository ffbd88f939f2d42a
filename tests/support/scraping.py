"""Metrics of a program, read over HTTP as Prometheus does."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


async def scraped(url: str, name: str, *, label: str = "") -> Mapping[str, float]:
    """Samples of one name by the value of a label; without one, their sum under ""."""

    def read() -> str:
        with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(await asyncio.to_thread(read)):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels[label] if label else ""] += sample.value
    return found
