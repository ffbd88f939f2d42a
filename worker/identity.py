"""Whether cached answers are those of uncached ones to the bit, found out by computing both.

    cold       | ........................ one chunk ........................ |  logits, KV
    a hit      | .. computed before .. |  then the rest                      |  the same?
    chunks     | ... | .............. | .................................... |  the same?
    beside     | ... another sequence in the same steps .................... |  the same?
    decodes    | .................................................. | | | | |  the same?

Rounding follows the order of sums, which libraries choose by the shape of a step. Where it is the same in every shape,
an answer does not depend on what was cached, on how prompts were cut or on who else was served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefixcache.errors import ConfigError
from prefixcache.protocol import Sampling
from worker.kv_cache import KVCache
from worker.runner import SampleSpec, StepShare

BLOCK_SIZE = 16
MOST_TOKENS = 177
"""More than a tile of rows (worker/attention/tiles.py), so that keys before a tile are tried as well."""
_DECODES = 40
"""Of a demo model every fifth decode differed when its single row was multiplied alone."""
_STRANGER_TOKENS = 37
NUM_BLOCKS = 2 * (MOST_TOKENS // BLOCK_SIZE + 1) + _STRANGER_TOKENS // BLOCK_SIZE + 1
_SAMPLE = SampleSpec(
    sampling=Sampling(seed=0), choice=0, index=0, prompt_ids=(), output_ids=(), stop_token_ids=frozenset()
)

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configs call the number of experts of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way through the same tokens: the ends of its chunks, and whether another sequence goes along."""

    what: str
    ends: Sequence[int]
    beside: bool = False


def require(
    model: PreTrainedModel,
    cache: KVCache,
    logits_of: Callable[[Sequence[StepShare]], Tensor],
    *,
    vocab_size: int,
    max_model_len: int,
) -> None:
    """Computes some 200 tokens ten times over `cache` of NUM_BLOCKS blocks. Raises ConfigError naming what differs."""
    trial = _Trial(cache, logits_of, vocab_size=vocab_size, num_tokens=min(MOST_TOKENS, max_model_len))
    finding = trial.first_difference()
    if finding is None:
        return
    config = model.config.get_text_config()
    if model.dtype == torch.float32:
        mend = "choose --dtype bfloat16, or leave it away: in float32 answers agree within 1e-5 of their logits"
    elif any(getattr(config, name, None) for name in _EXPERTS):
        mend = "its experts compute rows in groups that depend on the neighbours, so leave it away"
    else:
        mend = "leave it away"
    raise ConfigError(
        f"--deterministic cannot be kept by models of type {model.config.model_type} in "
        f"{str(model.dtype).removeprefix('torch.')} here: {finding}; {mend}"
    )


class _Trial:
    """Owns two tables of the cache for the sequence, one for a stranger."""

    def __init__(
        self,
        cache: KVCache,
        logits_of: Callable[[Sequence[StepShare]], Tensor],
        *,
        vocab_size: int,
        num_tokens: int,
    ) -> None:
        self._cache = cache
        self._logits_of = logits_of
        random = Random(7)
        self._tokens = [random.randrange(vocab_size) for _ in range(num_tokens)]
        self._stranger = [random.randrange(vocab_size) for _ in range(_STRANGER_TOKENS)]
        blocks = random.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        size = MOST_TOKENS // BLOCK_SIZE + 1
        self._cold_table, self._table, self._stranger_table = blocks[:size], blocks[size : 2 * size], blocks[2 * size :]

    def first_difference(self) -> str | None:
        """What differs from the cold answer first; None if nothing does."""
        end = len(self._tokens)
        expected = self._compute(_Way(what="cold", ends=(end,)), self._cold_table)
        for way in self._ways(end):
            logits, kv = self._compute(way, self._table)
            if not torch.equal(logits, expected[0]):
                return f"logits differ {way.what}"
            for (layer, ours), theirs in zip(kv.items(), expected[1].values(), strict=True):
                if not torch.equal(ours, theirs):
                    return f"K and V of layer {layer} differ {way.what}"
        return None

    def _ways(self, end: int) -> Iterator[_Way]:
        last_hit = (end - 1) // BLOCK_SIZE * BLOCK_SIZE
        for hit in sorted({BLOCK_SIZE, last_hit // 2 // BLOCK_SIZE * BLOCK_SIZE, last_hit}):
            if 0 < hit < end:
                yield _Way(what=f"after a hit of {hit} tokens", ends=(hit, end))
        yield _Way(what="after chunks of 7, 90 and more tokens", ends=[*(cut for cut in (7, 97) if cut < end), end])
        yield _Way(what="beside another sequence", ends=[*(cut for cut in (60,) if cut < end), end], beside=True)
        first = max(end - _DECODES, 1)
        yield _Way(what="where decodes wrote K and V", ends=range(first, end + 1))

    def _compute(self, way: _Way, table: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [1, vocab_size] after the last token, and by layer K and V of all of them, flat."""
        for layer in self._cache.layers.values():
            layer.keys[table] = torch.nan  # what an earlier way left would be right by chance
            layer.values[table] = torch.nan
        start = 0
        for end in way.ends:
            sample = _SAMPLE if end == len(self._tokens) else None
            shares = [StepShare(token_ids=self._tokens[start:end], start=start, block_table=table, sample=sample)]
            if way.beside:
                shares.insert(
                    0, StepShare(token_ids=self._stranger, start=0, block_table=self._stranger_table, sample=sample)
                )
            logits = self._logits_of(shares)
            start = end
        num_tokens = len(self._tokens)
        kept = {
            index: torch.cat([pool[table].flatten(0, 1)[:num_tokens].flatten() for pool in (layer.keys, layer.values)])
            for index, layer in self._cache.layers.items()
        }
        return logits[-1:], kept
