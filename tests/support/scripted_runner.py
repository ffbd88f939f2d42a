"""A runner without a model whose output shows every mistake in the use of blocks.

Its KV of a token is that token's id and position, kept per block and slot. It draws the next token as a hash of all
tokens of the sequence read back through the block table, so a wrong reuse, a stale block or a token never computed
changes the output or raises.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import xxhash

from prefixcache.protocol import Sampling, TokenLogprobs
from prefixcache.types import KV_BLOCK_SIZE, pack_tokens
from tests.support.requests import GREEDY, sample_spec
from worker.runner import Drawn, RunnerLimits, SampleSpec, StepShare

Script = Callable[[Sequence[int], int], int | None]
"""(prompt, index of the output token) -> the token to draw, or None for the hash."""


def drawn_token(tokens: Sequence[int], spec: SampleSpec, *, vocab_size: int, reserved: int = 0) -> int:
    """The token after `tokens`: what a correct engine must deliver. Ids below `reserved` are never drawn."""
    seed = 0 if spec.sampling.temperature == 0 else spec.sampling.seed ^ (spec.choice << 32) ^ spec.index
    return reserved + xxhash.xxh3_64_intdigest(pack_tokens(tokens), seed=seed) % (vocab_size - reserved)


def expected_output(
    prompt: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    sampling: Sampling | None = None,
    reserved: int = 0,
    choice: int = 0,
) -> list[int]:
    """The output of a request that was served correctly and not stopped."""
    tokens = list(prompt)
    for index in range(num_tokens):
        spec = sample_spec(sampling or GREEDY, prompt=prompt, index=index, choice=choice)
        tokens.append(drawn_token(tokens, spec, vocab_size=vocab_size, reserved=reserved))
    return tokens[len(prompt) :]


def made_up_logprobs(token: int, top_logprobs: int, *, vocab_size: int) -> TokenLogprobs:
    """What the runner says of a token it drew: that it was the likeliest, and the next ids each half as likely."""
    highest = -(1 + token % 8) / 4
    top = tuple(((token + place) % vocab_size, highest - place * math.log(2)) for place in range(top_logprobs))
    return TokenLogprobs(highest, top)


def outputs_by_prompt(outputs: Mapping[tuple[int, ...], Sequence[int]]) -> Script:
    """A script that emits the given ids for the given prompts; let the last one be a stop id."""

    def script(prompt: Sequence[int], index: int) -> int | None:
        ids = outputs.get(tuple(prompt), ())
        return ids[index] if index < len(ids) else None

    return script


class ScriptedRunner:
    """Implements worker.runner.Runner. Options:

    step_delay_s, token_delay_s     time that a step and each token of it take
    script                          forces output tokens
    share_fault                     an exception to return for a share
    step_fault                      an exception to raise for a whole step, by its number from 0
    reserved                        ids below it are never drawn unless scripted: a place for stop ids
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = KV_BLOCK_SIZE,
        max_model_len: int | None = None,
        vocab_size: int = 1_000,
        step_delay_s: float = 0.0,
        token_delay_s: float = 0.0,
        script: Script | None = None,
        share_fault: Callable[[StepShare], Exception | None] | None = None,
        step_fault: Callable[[int], Exception | None] | None = None,
        reserved: int = 0,
    ) -> None:
        self.limits = RunnerLimits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=num_blocks * block_size if max_model_len is None else max_model_len,
            vocab_size=vocab_size,
            kv_bytes_per_token=8,
        )
        self.step_delay_s = step_delay_s
        self.token_delay_s = token_delay_s
        self.script = script
        self.share_fault = share_fault
        self.step_fault = step_fault
        self.reserved = reserved
        self.num_steps = 0
        self.num_tokens = 0
        self.steps: list[list[StepShare]] = []
        """Every step so far, for tests that look at how work was divided."""
        self._memory: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._may_run = threading.Event()
        self._may_run.set()
        self._is_held = threading.Event()

    def pause(self) -> None:
        """Steps that begin from now on wait for `resume`."""
        self._is_held.clear()
        self._may_run.clear()

    def wait_until_held(self, timeout_s: float = 5.0) -> None:
        """Returns once a step has begun and waits. Blocks."""
        assert self._is_held.wait(timeout_s), f"no step began within {timeout_s} s"

    def resume(self) -> None:
        """Lets the held step and all that follow run."""
        self._may_run.set()

    def execute(self, shares: Sequence[StepShare]) -> list[Drawn | Exception | None]:
        if not self._may_run.is_set():
            self._is_held.set()
            self._may_run.wait()
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self.steps.append(list(shares))
        num_tokens = sum(len(share.token_ids) for share in shares)
        self.num_tokens += num_tokens
        if delay_s := self.step_delay_s + self.token_delay_s * num_tokens:
            time.sleep(delay_s)
        if self.step_fault is not None and (error := self.step_fault(number)) is not None:
            for share in shares:
                self._spoil(share)
            raise error
        return [self._compute(share) for share in shares]

    def _compute(self, share: StepShare) -> Drawn | Exception | None:
        if self.share_fault is not None and (error := self.share_fault(share)) is not None:
            self._spoil(share)
            return error
        if share.copied_block is not None:
            size = share.start % self.limits.block_size
            self._slots(share, share.start)[:size] = self._memory[share.copied_block][:size]
        for position, token in enumerate(share.token_ids, share.start):
            self._slots(share, position)[position % self.limits.block_size] = (token, position)
        if share.sample is None:
            return None
        tokens = self._read_back(share)
        token = self._draw(tokens, share.sample)
        asked = share.sample.sampling.top_logprobs
        logprobs = None if asked is None else made_up_logprobs(token, asked, vocab_size=self.limits.vocab_size)
        return Drawn(token_id=token, logprobs=logprobs)

    def _draw(self, tokens: list[int], spec: SampleSpec) -> int:
        """Raises if the engine tells of other tokens than those whose KV it had computed."""
        told = [*spec.prompt_ids, *spec.output_ids]
        if told != tokens or spec.index != len(spec.output_ids):
            raise AssertionError(f"told to draw token {spec.index} after {told}, but the KV is that of {tokens}")
        if self.script is not None and (forced := self.script(list(spec.prompt_ids), spec.index)) is not None:
            return forced
        return drawn_token(tokens, spec, vocab_size=self.limits.vocab_size, reserved=self.reserved)

    def _read_back(self, share: StepShare) -> list[int]:
        """All tokens of the sequence, from the memory. Raises for a slot that holds another position."""
        tokens = []
        for position in range(share.start + len(share.token_ids)):
            content = self._slots(share, position)[position % self.limits.block_size]
            if content is None or content[1] != position:
                block = share.block_table[position // self.limits.block_size]
                raise AssertionError(f"block {block} holds {content} where position {position} is expected")
            tokens.append(content[0])
        return tokens

    def _slots(self, share: StepShare, position: int) -> list[tuple[int, int] | None]:
        return self._memory[share.block_table[position // self.limits.block_size]]

    def _spoil(self, share: StepShare) -> None:
        """A failed share leaves nothing that could be trusted."""
        for position in range(share.start, share.start + len(share.token_ids)):
            self._slots(share, position)[position % self.limits.block_size] = None
