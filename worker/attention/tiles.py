"""Attention in bfloat16: matrix products of a tile of rows with all keys in sight, softmax between them.

    keys     0 ........................ end 0 0 0      gathered in order, then zeros up to one of few lengths
    tile 0   [ . . . . . . . ▒ ]                       ▒ holds keys that are hidden from some of the tile's rows
    tile 1   [ . . . . . . . . . . . . . . . ▒ ]       keys far behind a tile's last row are not touched

Torch's own flash attention makes its products too small for oneDNN (measured on a CPU with avx512_bf16 and without AMX:
1.7 times as long over 2,048 keys, 1.3 times for a decode). Scores are rounded to bfloat16, as transformers' eager
attention rounds them, but for layers where they grow large (`Examination.wide_layers`).

oneDNN sums each product of a row in one order, whatever rows stand beside it, unless it stands alone (measured: alike
for 2 to 512 rows, otherwise for one), and a hidden key adds an exact zero. So a row comes out the same to
the bit in a long chunk, in a short one after cached KV, and as a decode. Nobody promises that: worker/identity.py tries
it where somebody relies on it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from worker.attention.backend import AttentionCall
from worker.attention.scores import attend_by_scores
from worker.attention.step_layout import SequenceRows, StepLayout
from worker.kv_cache import LayerCache

KEY_STEP = 64
"""Keys come in multiples of it: each lane of softmax's sum has the same keys in every step."""
_LENGTHS = 8
"""Numbers of keys between two powers of two: each takes two kernels, to compile (0.7 ms) and to keep (0.6 MB)."""
_MOST_TILE_ROWS = 128
_ROW_STEP = 32
_FEW_ROWS = 8
_SCORES_AT_ONCE = 1 << 21
"""4 MiB of scores and as much of weights stay in the CPU's cache between two passes."""


class TileAttention:
    """Owns the memory that keys, values and scores pass through; grows to what the longest sequence needs."""

    def __init__(self, wide_layers: Collection[int]) -> None:
        self._wide_layers = wide_layers
        self._scratch: dict[str, Tensor] = {}

    def attend(
        self,
        call: AttentionCall,
        step: StepLayout,
        sequence: SequenceRows,
        layer: LayerCache,
        query: Tensor,
        out: Tensor,
    ) -> None:
        """query [num_heads, rows, key_dim] -> into out [rows, num_heads, value_dim], all of one sequence."""
        first_key = sequence.first_key(call.sliding_window) // KEY_STEP * KEY_STEP
        keys, values = self._gather(layer, sequence, first_key, step.block_size)
        by_scores = call.softcap is not None or call.sinks is not None or call.layer in self._wide_layers
        if sequence.num_rows == 1 and not by_scores:
            self._attend_alone(call, sequence, first_key, query[:, 0], keys, values, out[0])
            return
        num_rows = _tile_rows(query.shape[0], keys.shape[1])
        for first in range(0, sequence.num_rows, num_rows):
            rows = slice(first, min(first + num_rows, sequence.num_rows))
            start, end = sequence.start + rows.start - first_key, sequence.start + rows.stop - first_key
            num_keys = padded_keys(end)
            tile = query[:, rows]
            if by_scores:
                padded = self._padded(tile)
                hidden = step.hidden(start, padded.shape[1], 0, num_keys, call.sliding_window)
                attended = attend_by_scores(call, padded, keys[:, :num_keys], values[:, :num_keys], hidden)
            else:
                attended = self._attend_tile(call, step, start, tile, keys[:, :num_keys], values[:, :num_keys])
            out[rows] = attended[:, : tile.shape[1]].transpose(0, 1)

    def _attend_tile(
        self, call: AttentionCall, step: StepLayout, start: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """[num_heads, rows, key_dim] over [num_kv_heads, keys, dim] -> [num_heads, padded rows, value_dim].

        `start` is the first row's own place among the keys.
        """
        padded = self._padded(query)
        num_heads, num_rows, key_dim = padded.shape
        num_kv_heads, num_keys, value_dim = values.shape
        group = num_heads // num_kv_heads
        scores = self._memory("scores", num_kv_heads, group * num_rows, num_keys)
        grouped = padded.view(num_kv_heads, group * num_rows, key_dim)
        torch.baddbmm(scores, grouped, keys.transpose(1, 2), beta=0, alpha=call.scaling, out=scores)
        first_hidden = 0 if call.sliding_window is not None else start // KEY_STEP * KEY_STEP
        hidden = step.hidden(start, num_rows, first_hidden, num_keys, call.sliding_window)
        scores.view(num_kv_heads, group, num_rows, num_keys)[..., first_hidden:].masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1, out=self._memory("weights", *scores.shape))
        out = torch.bmm(weights, values, out=self._memory("out", num_kv_heads, group * num_rows, value_dim))
        return out.view(num_heads, num_rows, value_dim)

    def _attend_alone(
        self,
        call: AttentionCall,
        sequence: SequenceRows,
        first_key: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        """A decode: query [num_heads, key_dim] -> into out [num_heads, value_dim].

        Keys times queries, not the other way: oneDNN takes half the time with the longer side first.
        """
        num_kv_heads, num_keys, value_dim = values.shape
        grouped = query.reshape(num_kv_heads, -1, query.shape[-1])
        group = grouped.shape[1]
        num_rows = max(group, 2)  # never one row alone
        queries = grouped.transpose(1, 2).expand(-1, -1, num_rows)
        upright = self._memory("upright", num_kv_heads, num_keys, num_rows)
        torch.baddbmm(upright, keys, queries, beta=0, alpha=call.scaling, out=upright)
        scores = self._memory("scores", num_kv_heads, num_rows, num_keys).copy_(upright.transpose(1, 2))
        scores[..., sequence.end - first_key :] = -torch.inf
        scores[..., : sequence.first_key(call.sliding_window) - first_key] = -torch.inf
        weights = torch.softmax(scores, -1, out=self._memory("weights", *scores.shape))
        attended = torch.bmm(weights, values, out=self._memory("out", num_kv_heads, num_rows, value_dim))
        out.view(num_kv_heads, group, value_dim).copy_(attended[:, :group])

    def _gather(
        self, layer: LayerCache, sequence: SequenceRows, first_key: int, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """K and V from `first_key` on, then zeros: [num_kv_heads, keys, dim], each key's heads side by side."""
        blocks = sequence.blocks[first_key // block_size :]
        num_gathered, num_seen = len(blocks) * block_size, sequence.end - first_key
        num_keys = padded_keys(num_gathered)
        gathered = []
        for name, pool in (("keys", layer.keys), ("values", layer.values)):
            rows = self._memory(name, num_keys, *pool.shape[2:])
            torch.index_select(pool, 0, blocks, out=rows[:num_gathered].view(-1, *pool.shape[1:]))
            rows[num_seen:] = 0  # what stands there was never written, and 0 * NaN is NaN
            gathered.append(rows.transpose(0, 1))
        return gathered[0], gathered[1]

    def _padded(self, query: Tensor) -> Tensor:
        """A copy of [num_heads, rows, key_dim] with rows of zeros behind."""
        num_heads, num_rows, key_dim = query.shape
        num_padded = _FEW_ROWS if num_rows <= _FEW_ROWS else _up(num_rows, _ROW_STEP)
        rows = self._memory("query", num_heads, num_padded, key_dim)
        rows[:, :num_rows] = query
        rows[:, num_rows:] = 0
        return rows

    def _memory(self, name: str, *shape: int) -> Tensor:
        """Uninitialised, valid until the next call with this name."""
        size = torch.Size(shape).numel()
        memory = self._scratch.get(name)
        if memory is None or len(memory) < size:
            memory = self._scratch[name] = torch.empty(1 << (size - 1).bit_length(), dtype=torch.bfloat16)
        return memory[:size].view(shape)


def _tile_rows(num_heads: int, num_keys: int) -> int:
    fitting = _SCORES_AT_ONCE // (num_heads * num_keys) // _ROW_STEP * _ROW_STEP
    return min(max(fitting, _ROW_STEP), _MOST_TILE_ROWS)


def padded_keys(num_keys: int) -> int:
    """The next larger number of keys that is computed with: at most an eighth more, past 512."""
    return _up(num_keys, max(KEY_STEP, (1 << num_keys.bit_length() - 1) // _LENGTHS))


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
