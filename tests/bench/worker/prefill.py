"""Time to the first token: of cold prompts beside plain transformers, and of prompts that are cached in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from prefixcache.types import KV_BLOCK_SIZE
from tests.bench.report import Floor, Table
from tests.bench.worker.clock import Cost, spread
from tests.bench.worker.driven_engine import DrivenEngine
from tests.bench.worker.plain_model import PlainModel
from tests.bench.worker.prompts import new_prompt
from tests.bench.worker.sizes import Sizes

HIT_SHARE = 0.9

TimesAsFast = tuple[float, float]
"""The floor, and what is very good."""
COLD_FLOORS: Mapping[int, TimesAsFast] = {512: (1.0, 1.1), 2_048: (1.0, 1.1), 4_096: (0.9, 1.0)}
"""By the tokens of the prompt: over plain transformers."""
HIT_FLOORS: Mapping[int, TimesAsFast] = {2_048: (6.0, 7.0), 4_096: (6.0, 6.5)}
"""With nine tenths cached, over the cold prompt of the same repeat."""
REPEATED_FLOORS: Mapping[int, TimesAsFast] = {2_048: (15.0, 25.0)}
"""The same of a prompt that is sent once more as it was."""


@dataclass(slots=True, kw_only=True)
class Case:
    """Prompts of one kind and length; each measurement stands beside one of what it is compared with."""

    name: str
    tokens: int
    cached: int
    base: str
    floors: Mapping[int, TimesAsFast]
    own: list[Cost] = field(default_factory=list)
    of_base: list[Cost] = field(default_factory=list)

    def note(self, own: Cost, of_base: Cost) -> None:
        self.own.append(own)
        self.of_base.append(of_base)

    def row(self) -> dict[str, object]:
        pairs = list(zip(self.own, self.of_base, strict=True))
        return {
            "prompt": self.name,
            "tokens": self.tokens,
            "cached": self.cached,
            "CPU ms": spread(1e3 * own.cpu_s for own in self.own),
            "over": self.base,
            "its CPU ms": spread(1e3 * base.cpu_s for base in self.of_base),
            "times as fast": spread(base.cpu_s / own.cpu_s for own, base in pairs),
            "by the clock": spread(base.wall_s / own.wall_s for own, base in pairs),
        }

    def judged(self) -> list[Floor]:
        if self.tokens not in self.floors:
            return []
        least, very_good = self.floors[self.tokens]
        ratios = (own.cpu_s / base.cpu_s for own, base in zip(self.own, self.of_base, strict=True))
        what = f"prompt of {self.tokens:,}, {self.name}: TTFT over {self.base}"
        return [Floor(what=what, value=spread(ratios)[1], most=1 / least, very_good=1 / very_good)]


def prefill_blocks(sizes: Sizes) -> int:
    """Of the engine's cache: the longest prompt and half as much besides."""
    return max(sizes.prompts) * 3 // 2 // KV_BLOCK_SIZE


def measure_prefill(engine: DrivenEngine, plain: PlainModel, sizes: Sizes, random: Random) -> tuple[Table, list[Floor]]:
    """One round of each length goes before: in it the cache's memory is committed and kernels are made."""
    cases: list[Case] = []
    for tokens, num_calls in sizes.prompts.items():
        _Length(tokens).measure(engine, plain, sizes, random)
        length = _Length(tokens)
        for number in range(sizes.repeats * num_calls):
            length.measure(engine, plain, sizes, random, plain_first=number % 2 == 0)
        cases += [case for case in (length.cold, length.hit, length.repeated) if case.own]
    floors = [floor for case in cases for floor in case.judged()]
    return Table(title="Time to the first token", rows=[case.row() for case in cases]), floors


class _Length:
    """The cases of one length of prompt."""

    def __init__(self, tokens: int) -> None:
        self.shared = int(HIT_SHARE * tokens) // KV_BLOCK_SIZE * KV_BLOCK_SIZE
        whole = (tokens - 1) // KV_BLOCK_SIZE * KV_BLOCK_SIZE
        self.cold = Case(name="cold", tokens=tokens, cached=0, base="plain transformers'", floors=COLD_FLOORS)
        self.hit = Case(name="0.9 cached", tokens=tokens, cached=self.shared, base="the cold one's", floors=HIT_FLOORS)
        self.repeated = Case(
            name="sent again", tokens=tokens, cached=whole, base="the cold one's", floors=REPEATED_FLOORS
        )

    def measure(
        self, engine: DrivenEngine, plain: PlainModel, sizes: Sizes, random: Random, *, plain_first: bool = True
    ) -> None:
        """A new prompt by both, and what its blocks are good for afterwards."""
        tokens = self.cold.tokens
        prompt = new_prompt(random, tokens)
        of_plain = [plain.first_token(prompt)] if plain_first else []
        cold = engine.first_token(prompt, cached=0)
        of_plain = of_plain or [plain.first_token(prompt)]
        self.cold.note(cold, of_plain[0])
        for _ in range(sizes.hit_calls):
            if tokens in sizes.hits:
                similar = prompt[: self.shared] + new_prompt(random, tokens - self.shared)
                self.hit.note(engine.first_token(similar, cached=self.hit.cached), cold)
            if tokens == sizes.repeated:
                self.repeated.note(engine.first_token(prompt, cached=self.repeated.cached), cold)
