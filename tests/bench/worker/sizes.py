"""How much the benchmark does: enough for the floors, or a smoke that only shows that it still runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    repeats: int
    """Interleaved repeats of everything that is timed."""
    prompts: Mapping[int, int]
    """Tokens of a cold prompt -> how often it is measured in one repeat."""
    hits: tuple[int, ...]
    """Those of which a prompt that shares nine tenths is measured, too."""
    repeated: int
    """The prompt that is sent once more as it was."""
    hit_calls: int
    """Hits of one prompt in one repeat."""
    context_tokens: int
    """Tokens before the first one that a decode draws, up to a sixteenth more or less."""
    batches: tuple[int, ...]
    decode_steps: int
    """Of one repeat: steps in which the whole batch decodes."""
    prompt_lengths: int
    """Distinct ones that one worker process is asked for."""
    longest_prompt: int
    memory_blocks: int
    """KV blocks of that worker: few enough to be all used."""
    requests: int
    """That one simulated worker answers."""
    beside_prompts: tuple[int, ...]
    """Tokens of the prompts that vLLM is given, too."""
    beside_in_flight: tuple[int, ...]
    """Answers that are decoded at once beside vLLM."""


FULL = Sizes(
    repeats=5,
    prompts={512: 4, 2_048: 1, 4_096: 1},
    hits=(2_048, 4_096),
    repeated=2_048,
    hit_calls=3,
    context_tokens=1_024,
    batches=(1, 8, 32),
    decode_steps=16,
    prompt_lengths=300,
    longest_prompt=620,
    memory_blocks=1_024,
    requests=10_000,
    beside_prompts=(512, 2_048, 4_096),
    beside_in_flight=(1, 4, 8),
)
QUICK = Sizes(
    repeats=2,
    prompts={64: 1, 256: 1},
    hits=(256,),
    repeated=256,
    hit_calls=2,
    context_tokens=64,
    batches=(1, 4),
    decode_steps=4,
    prompt_lengths=8,
    longest_prompt=80,
    memory_blocks=64,
    requests=200,
    beside_prompts=(64,),
    beside_in_flight=(1,),
)
