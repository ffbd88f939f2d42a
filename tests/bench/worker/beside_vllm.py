"""Our worker behind our proxy, beside a real vLLM: the same prompts by the same client, one core each time."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from tests.bench.report import Floor, Table
from tests.bench.worker.clock import Cost, Moment, ProgramClock, spread
from tests.bench.worker.sizes import Sizes
from tests.bench.worker.vllm_server import on_core, running_vllm
from tests.support.program_fleet import ProgramFleet, all_ready
from tests.support.prompts import filler

ANSWER_TIMEOUT_S = 600.0
TOKENS_PER_WORD = 1.1
"""Of filler text with the demo model's tokenizer."""
NUM_BLOCKS = 2_850
"""As many tokens as vLLM keeps in one GiB of the demo model."""
MOST_COLD = 1.0
MOST_WARM = 0.5
"""CPU to the first token over vLLM's."""
DECODE_WORDS = 100
DECODE_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One answer: what it cost from the request to its first token, and from there on by token."""

    first: Cost
    each: Cost
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server."""

    name: str
    session: aiohttp.ClientSession
    url: str
    model: str
    clock: ProgramClock

    async def stream(self, prompt: str, max_tokens: int) -> Streamed:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = self.clock.now()
        moments: list[Moment] = []
        usage: dict[str, Any] = {}
        async with self.session.post(self.url + "/v1/completions", json=body, raise_for_status=True) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                if any(choice["text"] for choice in event["choices"]):
                    moments.append(self.clock.now())
                usage = event.get("usage") or usage
        decoded = moments[-1] - moments[0]
        num_gaps = max(usage["completion_tokens"] - 1, 1)
        return Streamed(
            first=moments[0] - began,
            each=Cost(cpu_s=decoded.cpu_s / num_gaps, wall_s=decoded.wall_s / num_gaps),
            cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        )


@dataclass(slots=True)
class _Pair:
    """Costs by the name of the target, as many of each."""

    of: defaultdict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))

    def median_s(self, name: str) -> float:
        return Cost.median(self.of[name]).cpu_s

    @property
    def ratio(self) -> float:
        return self.median_s("ours") / self.median_s("vLLM")

    def row(self) -> dict[str, object]:
        least_s = {name: min(cost.wall_s for cost in costs) for name, costs in self.of.items()}
        return {
            "ours, CPU ms": spread(1e3 * cost.cpu_s for cost in self.of["ours"]),
            "vLLM, CPU ms": spread(1e3 * cost.cpu_s for cost in self.of["vLLM"]),
            "ours over vLLM": self.ratio,
            "by the clock": least_s["ours"] / least_s["vLLM"],
        }


async def measure_beside_vllm(
    fleet: ProgramFleet, program: Path, folder: Path, dtype: str, sizes: Sizes, random: Random
) -> list[tuple[Table, list[Floor]]]:
    """The client runs where it likes; both servers, of which one works at a time, on the last core."""
    core = max(os.sched_getaffinity(0))
    with on_core(core):
        flags = ("--model", str(folder), "--dtype", dtype, "--threads", "1", "--num-blocks", str(NUM_BLOCKS))
        worker = fleet.start_worker("ours", *flags, runner="torch")
        await worker.said(" ready at ")
        proxy = await fleet.start_proxy("proxy")
    await all_ready(proxy, 1)
    log = worker.log.with_name("vllm.log")
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with (
        running_vllm(program, folder, dtype, core, log) as (vllm_url, vllm_pid),
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        own_clock, vllm_clock = ProgramClock(worker.process.pid, proxy.process.pid), ProgramClock(vllm_pid)
        targets = [
            Target(name="ours", session=session, url=proxy.url, model=folder.name, clock=own_clock),
            Target(name="vLLM", session=session, url=vllm_url, model=folder.name, clock=vllm_clock),
        ]
        return [await _first_tokens(targets, sizes, random), (await _decoded(targets, sizes, random), [])]


def _words(random: Random, num_words: int) -> str:
    return filler(num_words, seed=random.getrandbits(64))


async def _first_tokens(targets: Sequence[Target], sizes: Sizes, random: Random) -> tuple[Table, list[Floor]]:
    """Each prompt is sent twice to one target, then to the other; the first prompt of a length is thrown away."""
    rows: list[dict[str, object]] = []
    floors: list[Floor] = []
    for tokens in sizes.beside_prompts:
        cold, again = _Pair(), _Pair()
        for number in range(sizes.repeats + 1):
            prompt = _words(random, int(tokens / TOKENS_PER_WORD))
            for target in targets if number % 2 else reversed(targets):
                first, second = await target.stream(prompt, 2), await target.stream(prompt, 2)
                assert first.cached_tokens == 0 < second.cached_tokens, (target.name, first, second)
                if number:
                    cold.of[target.name].append(first.first)
                    again.of[target.name].append(second.first)
        for name, pair, most in (("cold", cold, MOST_COLD), ("sent again", again, MOST_WARM)):
            rows.append({"prompt": name, "tokens": tokens, **pair.row()})
            what = f"prompt of {tokens:,}, {name}: CPU to the first token over vLLM's"
            floors.append(Floor(what=what, value=pair.ratio, most=most))
    return Table(title="Time to the first token beside vLLM, over HTTP", rows=rows), floors


async def _decoded(targets: Sequence[Target], sizes: Sizes, random: Random) -> Table:
    """After prompts that are cached, so that their prefills do not count; these are no floors."""
    rows: list[dict[str, object]] = []
    for in_flight in sizes.beside_in_flight:
        prompts = [_words(random, DECODE_WORDS) for _ in range(in_flight)]
        pair = _Pair()
        for number in range(sizes.repeats + 1):
            for target in targets if number % 2 else reversed(targets):
                streams = await asyncio.gather(*(target.stream(prompt, DECODE_TOKENS) for prompt in prompts))
                if number:
                    pair.of[target.name].append(Cost.median([streamed.each for streamed in streams]))
        rates = {f"{name}, tokens a CPU second": in_flight / pair.median_s(name) for name in pair.of}
        rows.append({"in flight": in_flight, **pair.row(), **rates})
    return Table(title="An output token beside vLLM, over HTTP", rows=rows)
