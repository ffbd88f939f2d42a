"""What executes a step: the boundary between the engine's decisions and a model's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixcache.protocol import Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """How to draw output token `index` (counted from 0) of choice `choice` after the last token of a share."""

    sampling: Sampling
    choice: int
    index: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """The output so far, what another worker drew of it included: `index` ids."""
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None
    """Where the sampling's `top_logprobs` asks for them, else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """One sequence's share in a step: `token_ids` stand at positions start .. start + len(token_ids) - 1.

    block_table   [ b0 | b1 | b2 | b3 ]      covers every position up to the last one of the share
    positions       0 ....... start ... end
                    ^ KV is there   ^ computed now, written through the block table
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None
    """None for a chunk that is not the last of its prefill."""
    copied_block: int | None = None
    """Whose KV is, up to `start`, that of the block in which the share begins: copied there before the step writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What a runner can hold."""

    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int
    pair_rows: float = 0.0
    """What attending to one key takes beside the rest of a row's work, by the model's shape: 1/3,000 for a model whose
    rows take twice as long after 3,000 tokens. The engine begins with it and learns the rest."""


class Runner(Protocol):
    """Called by one thread only, the step thread."""

    limits: RunnerLimits

    def execute(self, shares: Sequence[StepShare]) -> list[Drawn | Exception | None]:
        """Computes KV of all shares and draws the tokens asked for, one result a share and in their order.

        A result is the drawn token, None where no sample was asked for, or the exception that struck this share alone.
        Raises only when the whole step failed; no KV of the step's shares may be trusted then.
        """
