"""TTFT through the whole path: `make bench-proxy`.

Each round uses a system prompt never seen before. Its first chat is cold and is the baseline of the same round; the
second and third share the prefix. One client, streaming, a 1,500-token prompt, two CPU workers on the demo model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.bench.report import Floor, Table, report
from tests.support.prompts import filler
from tests.support.stack import RunningStack, running_stack

TTFT_RATIO_FLOOR = 0.25
"""Cached TTFT as a share of the cold TTFT of the same round."""
CACHED_SHARE_FLOOR = 0.9


def _ttft(stack: RunningStack, system: str, question: str) -> tuple[float, dict[str, Any], str]:
    """Seconds to the first content byte, usage, and the worker that answered."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        stack.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    ttft_s: float | None = None
    usage: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if ttft_s is None and any(choice["delta"].get("content") for choice in chunk["choices"]):
                    ttft_s = time.perf_counter() - began
                usage = chunk.get("usage") or usage
        worker = answer.headers["x-prefixcache-worker"]
    assert ttft_s is not None, "the answer had no content"
    return ttft_s, usage, worker


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    options.add_argument("--rounds", type=int, default=5)
    rounds = options.parse_args().rounds
    rows: list[dict[str, object]] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder, running_stack(Path(folder), []) as stack:
        for number in range(1, rounds + 1):
            system = filler(1400, seed=1000 + number)
            cold_s, cold, cold_worker = _ttft(stack, system, "What do rivers carry?")
            for question in ("And what do harbors keep?", "Which season is named?"):
                cached_s, usage, worker = _ttft(stack, system, question)
                ratios.append(cached_s / cold_s)
                rows.append(
                    {
                        "round": number,
                        "prompt": usage["prompt_tokens"],
                        "cached": usage["prompt_tokens_details"]["cached_tokens"],
                        "same worker": "yes" if worker == cold_worker else "no",
                        "cold TTFT s": cold_s,
                        "cached TTFT s": cached_s,
                        "ratio": cached_s / cold_s,
                    }
                )
            assert cold["prompt_tokens_details"]["cached_tokens"] == 0, "the first chat of a round must be cold"
    uncached_share = max(1 - int(str(row["cached"])) / int(str(row["prompt"])) for row in rows)
    table = Table(title="TTFT of a chat whose system prompt is new, and of two that share it", rows=rows)
    table.show()
    report(
        "proxy",
        [table],
        [
            Floor(what="median cached TTFT / cold TTFT", value=statistics.median(ratios), most=TTFT_RATIO_FLOOR),
            Floor(what="largest uncached share", value=uncached_share, most=1 - CACHED_SHARE_FLOOR),
        ],
    )


if __name__ == "__main__":
    main()
