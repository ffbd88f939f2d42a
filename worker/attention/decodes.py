"""Decodes in bfloat16: those of like length in one product for every KV head.

    a   | . . . . . . . . . . 0 |      keys gathered side by side, each sequence's padded to the longest's;
    b   | . . . . . . . 0 0 0 0 |      what is padded, or left a sliding window, weighs 0
    c   | . . . . . . . . . . . |

A row is summed as in a tile of many rows (worker/attention/tiles.py), so KV that a decode writes is that of a prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.backend import AttentionCall
from worker.attention.key_steps import KEY_STEP, round_up
from worker.attention.scratch import Scratch
from worker.attention.step_layout import SequenceRows, StepLayout
from worker.kv_cache import LayerCache, blocks_of_heads, of_every_head

_KEYS_AT_ONCE_BYTES = 4 << 20
"""Of a group: what is gathered is still in the CPU's cache when it is multiplied (measured: 32 sequences of 1,024
tokens take 7.7, 6.0 and 7.1 ms a layer in groups of 1, 8 and 32)."""
_LEAST_FILLED = 0.75
"""A sequence joins a group whose longest it is at least so long as."""


_LEAST_PRODUCT = 16 * 16 * 16
"""Multiplications up to which torch leaves a product to its own loops (ATen/native/mkldnn/Matmul.cpp), which round
otherwise than oneDNN. The batch counts, so a small model's decode would depend on how many decodes stand beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """What its sequences have in common for all layers of a kind."""

    num_sequences: int
    num_keys: int
    places: Tensor  # [num_sequences * num_kv_heads * blocks] in blocks_of_heads
    first_hidden: int
    hidden: Tensor  # [num_sequences, 1, num_keys - first_hidden] bool
    unwritten: Tensor  # those of the num_sequences * num_kv_heads * num_keys gathered rows which nobody wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Groups one after the other."""

    groups: tuple[_Group, ...]
    rows: Tensor  # [num_sequences] rows of the step in the order of the groups


class DecodeAttention:
    """Groups the decodes of a step once, and attends group by group in every layer."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._step: StepLayout | None = None
        self._plans: dict[tuple[int | None, torch.Size], _Plan] = {}

    def attend(
        self,
        call: AttentionCall,
        step: StepLayout,
        sequences: Sequence[SequenceRows],
        layer: LayerCache,
        query: Tensor,
        out: Tensor,
    ) -> None:
        """query [num_heads, rows of the step, key_dim] -> into out [rows of the step, num_heads, value_dim].

        `sequences` of one row each, always the same of a step.
        """
        if step is not self._step:
            self._step, self._plans = step, {}
        kind = (call.sliding_window, layer.keys.shape)
        if kind not in self._plans:
            self._plans[kind] = _plan(sequences, call.sliding_window, layer.keys, step.block_size)
        plan = self._plans[kind]
        num_kv_heads, value_dim = layer.values.shape[2:]
        num_sequences = len(plan.rows)
        queries = (
            query.transpose(0, 1).index_select(0, plan.rows).view(num_sequences * num_kv_heads, -1, query.shape[-1])
        )
        group = queries.shape[1]
        num_rows = _least_rows(num_kv_heads, min(queries.shape[-1], value_dim))
        if group < num_rows:
            queries = queries.repeat(1, -(-num_rows // group), 1)
        attended = self._scratch.take("attended", num_sequences * num_kv_heads, queries.shape[1], value_dim)
        first = 0
        for each in plan.groups:
            rows = slice(first, first + each.num_sequences * num_kv_heads)
            self._attend_group(call, each, layer, queries[rows], attended[rows])
            first = rows.stop
        out.index_copy_(0, plan.rows, attended[:, :group].reshape(num_sequences, -1, value_dim))

    def _attend_group(
        self, call: AttentionCall, group: _Group, layer: LayerCache, queries: Tensor, out: Tensor
    ) -> None:
        """queries [num_sequences * num_kv_heads, query heads of a KV head, key_dim] -> into out [.., .., value_dim]."""
        batch, num_rows, key_dim = queries.shape
        block_size, value_dim = layer.values.shape[1], layer.values.shape[3]
        keys = self._scratch.take("keys", len(group.places), block_size, key_dim)
        torch.index_select(blocks_of_heads(layer.keys), 0, group.places, out=keys)
        scores = self._scratch.take("scores", batch, num_rows, group.num_keys)
        upright = keys.view(batch, group.num_keys, key_dim).transpose(1, 2)
        torch.baddbmm(scores, queries, upright, beta=0, alpha=call.scaling, out=scores)
        of_sequences = scores.view(group.num_sequences, -1, group.num_keys)
        of_sequences[..., group.first_hidden :].masked_fill_(group.hidden, -torch.inf)
        weights = torch.softmax(scores, -1, out=self._scratch.take("weights", *scores.shape))
        values = self._scratch.take("keys", len(group.places), block_size, value_dim)
        torch.index_select(blocks_of_heads(layer.values), 0, group.places, out=values)
        values.view(-1, value_dim).index_fill_(0, group.unwritten, 0)  # may be NaN, and 0 * NaN is NaN
        torch.bmm(weights, values.view(batch, group.num_keys, value_dim), out=out)


def _least_rows(num_kv_heads: int, dim: int) -> int:
    """Of one sequence's queries: two, for a row alone is summed in another order, and enough for oneDNN."""
    return max(2, _LEAST_PRODUCT // (num_kv_heads * dim * KEY_STEP) + 1)


# --- plans ------------------------------------------------------------------------------------------------


def _plan(sequences: Sequence[SequenceRows], sliding_window: int | None, pool: Tensor, block_size: int) -> _Plan:
    """Longest first; a power of two sequences in each group, so that oneDNN meets few sizes."""
    num_blocks, _, num_kv_heads, dim = pool.shape
    keys_at_once = _KEYS_AT_ONCE_BYTES // (num_kv_heads * dim * pool.itemsize)
    ordered = sorted(sequences, key=lambda sequence: _num_keys(sequence, sliding_window), reverse=True)
    counts = [_num_keys(sequence, sliding_window) for sequence in ordered]
    groups = []
    first = 0
    while first < len(ordered):
        longest = round_up(counts[first], KEY_STEP)
        alike = sum(count >= _LEAST_FILLED * longest for count in counts[first:])
        size = 1 << max(min(alike, keys_at_once // longest), 1).bit_length() - 1
        chosen = ordered[first : first + size]
        groups.append(_group(chosen, longest, sliding_window, num_kv_heads, num_blocks, block_size))
        first += size
    return _Plan(groups=tuple(groups), rows=torch.tensor([sequence.first_row for sequence in ordered]))


def _group(
    sequences: Sequence[SequenceRows],
    num_keys: int,
    sliding_window: int | None,
    num_kv_heads: int,
    num_blocks: int,
    block_size: int,
) -> _Group:
    first_keys = [first_gathered(sequence, sliding_window) for sequence in sequences]
    blocks = torch.stack(
        [gathered_blocks(*pair, num_keys, block_size) for pair in zip(sequences, first_keys, strict=True)]
    )
    first_key = torch.tensor(first_keys).unsqueeze(1)
    end = torch.tensor([sequence.end for sequence in sequences]).unsqueeze(1) - first_key
    first_seen = torch.tensor([sequence.first_key(sliding_window) for sequence in sequences]).unsqueeze(1) - first_key
    keys = torch.arange(num_keys).unsqueeze(0)
    hidden = (keys >= end) | (keys < first_seen)  # [num_sequences, num_keys]
    first_hidden = 0 if sliding_window is not None else int(end.min())
    written = torch.where(keys < (end + block_size - 1) // block_size * block_size, keys, keys % block_size) < end
    return _Group(
        num_sequences=len(sequences),
        num_keys=num_keys,
        places=of_every_head(blocks, num_kv_heads, num_blocks).flatten(),
        first_hidden=first_hidden,
        hidden=hidden[:, None, first_hidden:],
        unwritten=(~written).unsqueeze(1).expand(-1, num_kv_heads, -1).flatten().nonzero().flatten(),
    )


def first_gathered(sequence: SequenceRows, sliding_window: int | None) -> int:
    """The first key in sight, or one before it where a step of keys begins."""
    return sequence.first_key(sliding_window) // KEY_STEP * KEY_STEP


def gathered_blocks(sequence: SequenceRows, first_key: int, num_keys: int, block_size: int) -> Tensor:
    """[num_keys / block_size] ids from `first_key` on; past the sequence's last block the first again and again."""
    blocks = sequence.blocks[first_key // block_size :]
    missing = num_keys // block_size - len(blocks)
    return torch.cat((blocks, blocks[:1].expand(missing)))


def _num_keys(sequence: SequenceRows, sliding_window: int | None) -> int:
    return sequence.end - first_gathered(sequence, sliding_window)
