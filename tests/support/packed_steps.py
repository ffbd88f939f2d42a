"""Sequences computed by a runner in random chunks, beside each other, over shuffled and shared blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.requests import sample_spec
from worker.attention import self_test
from worker.attention.backend import AttentionBackend
from worker.attention.cpu_sdpa import CpuSdpa
from worker.kv_cache import KVCache, KVShape
from worker.model_runner import TorchRunner
from worker.rope import freeze_rope
from worker.runner import StepShare

GREEDY = sample_spec()


@dataclass(slots=True, kw_only=True)
class PackedSequence:
    """A sequence on its way through steps."""

    tokens: Sequence[int]
    block_table: Sequence[int]
    computed: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    """By position, where a sample was asked for: [vocab_size]."""


def runner_of(
    model: PreTrainedModel,
    *,
    num_blocks: int,
    block_size: int = 16,
    make: Callable[[KVCache], AttentionBackend] = CpuSdpa,
) -> TorchRunner:
    """A runner over a model, its rope frozen, without the self-test."""
    examination = self_test.examine(model)
    max_model_len = num_blocks * block_size
    freeze_rope(model, max_model_len)
    cache = KVCache(KVShape(layers=examination.shapes, dtype=model.dtype, block_size=block_size), num_blocks)
    return TorchRunner(model, cache, max_model_len=max_model_len, threads=1, backend=make(cache))


def compute(runner: TorchRunner, sequences: Sequence[PackedSequence], source: random.Random) -> None:
    """Runs every sequence to its end; each step takes a random chunk (often one token) of some of them."""
    while unfinished := [sequence for sequence in sequences if sequence.computed < len(sequence.tokens)]:
        chosen = source.sample(unfinished, source.randint(1, len(unfinished)))
        shares = [_share(sequence, source) for sequence in chosen]
        rows = iter(runner.logits(shares))
        for sequence, share in zip(chosen, shares, strict=True):
            sequence.computed = share.start + len(share.token_ids)
            if share.sample is not None:
                sequence.logits[sequence.computed - 1] = next(rows)


def _share(sequence: PackedSequence, source: random.Random) -> StepShare:
    left = len(sequence.tokens) - sequence.computed
    size = min(left, source.choice([1, 1, source.randint(1, 40)]))
    return StepShare(
        token_ids=sequence.tokens[sequence.computed : sequence.computed + size],
        start=sequence.computed,
        block_table=sequence.block_table,
        sample=GREEDY if size == left or source.random() < 0.5 else None,
    )


def worst_error(model: PreTrainedModel, source: random.Random) -> float:
    """Largest relative error of logits, packed, paged, chunked and over shared KV, against plain eager forwards.

    The third sequence begins with two blocks of the first one's tokens and finds them in the cache.
    """
    first, second, other = (_random_tokens(source, size) for size in (50, 33, 12))
    third = first[:32] + other
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        truth = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in (first, second, third)]
    blocks = source.sample(range(12), 12)
    runner = runner_of(model, num_blocks=12)
    sequences = [
        PackedSequence(tokens=first, block_table=blocks[:4]),
        PackedSequence(tokens=second, block_table=blocks[4:7]),
        PackedSequence(tokens=third, block_table=[*blocks[:2], blocks[7]], computed=32),
    ]
    compute(runner, sequences[:1], source)
    compute(runner, sequences[1:], source)
    errors = [
        self_test.relative_error(logits[None], truth[place][position][None])
        for place, sequence in enumerate(sequences)
        for position, logits in sequence.logits.items()
    ]
    return max(errors)


def _random_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(3, 500) for _ in range(count)]
