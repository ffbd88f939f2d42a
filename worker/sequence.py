"""State of one request in the engine.

    tokens     [ prompt .......................... | output so far ... ]
               0                                   num_prompt_tokens    num_tokens
    KV         [ reused ....... | computed ........ ^ num_computed_tokens ]
    blocks     [ b0 | b1 | b2 | b3 | b4 |            block_table covers num_computed_tokens and this step's share
               registered ......^                    leading blocks that are findable in the pool

The last token has no KV until it is fed to draw the next one, so num_computed_tokens < num_tokens while it runs.
"""

from __future__ import annotations

from collections.abc import Hashable

from prefixcache.hashing import next_hash
from prefixcache.protocol import EndReason, Generate, Usage
from worker.request_check import check_request
from worker.runner import RunnerLimits, SampleSpec


class Sequence:
    """One request: its tokens, its blocks and what it has cost."""

    def __init__(self, owner: Hashable, request: Generate, limits: RunnerLimits, *, arrived_at: float) -> None:
        """Raises InvalidRequest or ContextLengthExceeded for what the runner can never serve.

        `owner` tells apart equal ids of different streams.
        """
        prompt, output = check_request(request, limits)
        self.owner = owner
        self.id = request.id
        self.root = request.root
        self.sampling = request.sampling
        self.choice = request.choice
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self.max_tokens = request.max_tokens
        self.prompt_ids = prompt
        self.tokens = prompt + output
        self.num_prompt_tokens = len(prompt)
        self.num_continued_tokens = len(output)
        """Output tokens that another worker generated."""
        self.predicted_hit_tokens = request.predicted_hit_tokens
        self.predicted_for = request.predicted_for

        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_registered_blocks = 0
        self.copied_block: int | None = None
        """From which its next step copies what is reused of the block after the registered ones."""

        self.cached_tokens = 0
        """Of the prompt, in whole blocks, as engines report them."""
        self.copied_tokens = 0
        """Those after them that a block which begins alike had."""
        self.prefilled_tokens = 0
        self.num_preemptions = 0
        self.arrived_at = arrived_at
        self.waiting_since = arrived_at - request.waited_s
        """On the same clock, the time at the proxy included: by it requests are ordered."""
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

        self._block_size = limits.block_size
        self._vocab_size = limits.vocab_size
        self._hashes: list[int] = []
        self._num_reached_tokens = 0
        """The most tokens that ever had KV: what is reused below it after a preemption is not counted again."""

    @property
    def key(self) -> tuple[Hashable, str]:
        return self.owner, self.id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_reusable_blocks(self) -> int:
        """The most blocks it may take from the pool: the last token is always computed."""
        return (len(self.tokens) - 1) // self._block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self._block_size)

    def block_hash(self, position: int) -> int:
        """Chained hash of the full block at `position`; computed once and kept."""
        hashes = self._hashes
        while len(hashes) <= position:
            hashes.append(next_hash(hashes[-1] if hashes else self.root, self.block_content(len(hashes))))
        return hashes[position]

    def block_content(self, position: int) -> bytes:
        """Packed ids of the full block at `position`."""
        return self.content_after(position, len(self.tokens))

    def content_after(self, num_blocks: int, end: int) -> bytes:
        """Packed ids behind the first `num_blocks` blocks up to token `end`, a block of them at most."""
        start = num_blocks * self._block_size
        return self.tokens[start : min(start + self._block_size, end)].tobytes()

    def sample_spec(self) -> SampleSpec:
        """How the token after the last one is drawn."""
        # A copy of the output, for a view would keep the array from growing; 4 KB for 1,000 tokens.
        return SampleSpec(
            sampling=self.sampling,
            choice=self.choice,
            index=self.num_output_tokens,
            prompt_ids=self.prompt_ids,
            output_ids=self.tokens[self.num_prompt_tokens :],
            stop_token_ids=self.stop_token_ids,
        )

    def reuse(self, block_ids: list[int], *, copied: tuple[int, int] | None = None) -> None:
        """Appends blocks found in the pool, already held, to the table; everything before them is computed.

        `copied`: a block and how many of its tokens the next step copies into the one after them.
        """
        self.block_table += block_ids
        self.num_registered_blocks = len(self.block_table)
        self.cached_tokens += self._reach_by_reuse(len(self.block_table) * self._block_size)
        if copied is not None:
            self.copied_block, num_copied = copied
            self.copied_tokens += self._reach_by_reuse(self.num_computed_tokens + num_copied)

    def _reach_by_reuse(self, num_tokens: int) -> int:
        """How many tokens of the prompt have KV by it that had none before."""
        first_seen = max(self.num_computed_tokens, self._num_reached_tokens)
        self._reach(num_tokens)
        return max(min(num_tokens, self.num_prompt_tokens) - min(first_seen, self.num_prompt_tokens), 0)

    def computed(self, num_tokens: int) -> None:
        """A step has computed the KV of the next `num_tokens` tokens."""
        if self.first_token_at is None or num_tokens > 1:
            self.prefilled_tokens += num_tokens
        self.copied_block = None
        self._reach(self.num_computed_tokens + num_tokens)

    def _reach(self, num_tokens: int) -> None:
        self.num_computed_tokens = num_tokens
        self._num_reached_tokens = max(self._num_reached_tokens, num_tokens)

    def append(self, token: int) -> EndReason | None:
        """Takes a drawn token; the reason if the answer ends with it. Raises ValueError for an id outside the model."""
        if not 0 <= token < self._vocab_size:
            raise ValueError(f"the runner drew token {token}, outside the vocabulary of {self._vocab_size}")
        self.tokens.append(token)
        if token in self.stop_token_ids:
            return "stop"
        return "length" if self.num_output_tokens >= self.max_tokens else None

    def forget_blocks(self) -> None:
        """After its blocks were released: everything is to be reused or computed again."""
        self.block_table = []
        self.num_computed_tokens = 0
        self.num_registered_blocks = 0
        self.copied_block = None

    def usage(self, now: float) -> Usage:
        """What it has cost up to `now`."""
        started_at = now if self.started_at is None else self.started_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return Usage(
            cached_tokens=self.cached_tokens,
            copied_tokens=self.copied_tokens,
            computed_tokens=self.prefilled_tokens,
            output_tokens=self.num_output_tokens - self.num_continued_tokens,
            queue_s=started_at - self.arrived_at,
            prefill_s=first_token_at - started_at,
            decode_s=now - first_token_at,
            preemptions=self.num_preemptions,
        )
