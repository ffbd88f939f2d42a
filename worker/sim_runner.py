"""The simulated engine's runner: real blocks and real time, no tensors.

    write the shares' tokens into blocks -> read the sequences back through their tables -> draw -> sleep out the step

A product, not a test double: with real scheduler, block pool, publisher and protocol around it, many workers on one
machine behave as a fleet would whose steps take what the cost model says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from prefixcache.errors import ConfigError
from prefixcache.types import KV_BLOCK_SIZE, TOKEN_BYTES, unpack_tokens
from worker.runner import Drawn, Runner, RunnerLimits, SampleSpec, StepShare
from worker.sim_context import SimContexts
from worker.sim_costs import CostModel
from worker.sim_kv import SimKV
from worker.sim_model import VOCAB_SIZE, logits_after
from worker.sim_sampler import draw

DEFAULT_NUM_BLOCKS = 16_384
"""A quarter of a million tokens."""
DEFAULT_MAX_MODEL_LEN = 131_072

_KV_BYTES_PER_TOKEN = 4
"""A token's id is all that is kept of it."""

_MOST_LATE_S = 0.05
"""What a step that goes on with the last one's sequences makes up for: the engine's own work between two steps, which
a real one does while it computes, and its waits for a core of this machine. After a longer one, time is lost."""

ForcedTokens = Callable[[Sequence[int], int], int | None]
"""(prompt, index of the output token) -> the token to draw, or None to leave it to the model."""


class SimRunner(Runner):
    """Runner over the simulated KV cache, model and time. `sleep` must release the interpreter lock."""

    def __init__(
        self,
        *,
        costs: CostModel,
        num_blocks: int = DEFAULT_NUM_BLOCKS,
        max_model_len: int | None = None,
        block_size: int = KV_BLOCK_SIZE,
        forced: ForcedTokens | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`max_model_len` None: what the blocks allow, up to a limit. Raises ConfigError for more than they hold."""
        num_tokens = num_blocks * block_size
        if max_model_len is not None and max_model_len > num_tokens:
            raise ConfigError(
                f"maximum model length {max_model_len:,} is over the {num_tokens:,} tokens "
                f"that {num_blocks:,} KV blocks hold"
            )
        self._costs = costs
        self._kv = SimKV(num_blocks=num_blocks, block_size=block_size)
        self._contexts = SimContexts(self._kv, block_size=block_size)
        self._forced = forced
        self._clock = clock
        self._sleep = sleep
        self._ends_at = -math.inf
        """When the last step was to end."""
        self.limits = RunnerLimits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len or min(DEFAULT_MAX_MODEL_LEN, num_tokens),
            vocab_size=VOCAB_SIZE,
            kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
        )

    def execute(self, shares: Sequence[StepShare]) -> list[Drawn | Exception | None]:
        began_at = self._clock()
        if self._contexts.step(shares) and began_at - self._ends_at < _MOST_LATE_S:
            began_at = self._ends_at
        self._ends_at = began_at + self._costs.step_s(shares)
        results = [self._compute(share) for share in shares]
        left_s = self._ends_at - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return results

    def _compute(self, share: StepShare) -> Drawn | Exception | None:
        try:
            self._kv.write(share)
            return None if share.sample is None else self._draw(share, share.sample)
        except Exception as error:
            self._kv.spoil(share)  # the engine logs the error and fails this request alone
            return error

    def _draw(self, share: StepShare, spec: SampleSpec) -> Drawn:
        context = self._contexts.after(share, spec.index)
        forced = None
        if self._forced is not None:
            whole = self._kv.read(share)
            forced = self._forced(unpack_tokens(whole[: len(whole) - TOKEN_BYTES * spec.index]), spec.index)
        return draw(logits_after(context.digest, context.output), spec, forced=forced)
