"""What a step of the simulated engine costs in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from prefixcache.errors import ConfigError
from prefixcache.step_costs import StepTerms
from worker.runner import StepShare
from worker.step_costs import pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel(StepTerms):
    """A step's time, from the shares in it.

    So ITL at batch N is what decodes cost plus `step_ms`, longer where prefill chunks share the step, and
    the TTFT of a request that runs alone is its uncached tokens * prefill_us plus a step for each chunk of 512.
    A share of one token is a decode: the last token of a prompt that is cached up to it costs what a decode does.

    `prefill_us_per_1k_context` makes the later tokens of a long prefill dearer than its first, as attention does: it is
    added for each token and every 1,000 tokens before it. `prefixcache simulate` has no such term.
    """

    prefill_us_per_1k_context: float = 0.0

    def __post_init__(self) -> None:
        """Raises ConfigError for a cost that is none."""
        for field in fields(self):
            value = getattr(self, field.name)
            flag = f"--sim-{field.name.replace('_', '-')}"
            if field.name == "speed":
                if not value > 0:
                    raise ConfigError(f"{flag} is {value}; it must be more than 0, 2 for twice as fast")
            elif not 0 <= value < math.inf:
                raise ConfigError(f"{flag} is {value}; it must be a finite number, at least 0")

    def step_s(self, shares: Sequence[StepShare]) -> float:
        """Seconds that one step of these shares takes."""
        prefill_tokens = num_decodes = context_tokens = 0
        num_pairs = 0.0
        for share in shares:
            num_tokens = len(share.token_ids)
            if num_tokens == 1:
                num_decodes += 1
                context_tokens += share.start + 1
            else:
                prefill_tokens += num_tokens
                num_pairs += pairs(share.start, num_tokens)
        attention_s = self.prefill_us_per_1k_context * num_pairs / 1e9 / self.speed
        return self.cost_s(prefill_tokens, num_decodes, context_tokens) + attention_s
