"""Attention in bfloat16: matrix products of a tile of rows with all keys in sight, softmax between them.

    keys     0 ........................ end 0 0 0      gathered in order, then zeros up to one of few lengths
    tile 0   [ . . . . . . . ▒ ]                       ▒ holds keys that are hidden from some of the tile's rows
    tile 1   [ . . . . . . . . . . . . . . . ▒ ]       keys far behind a tile's last row are not touched

Torch's own flash attention makes its products too small for oneDNN (measured on a CPU with avx512_bf16 and no AMX: it
takes 1.7 times as long over 2,048 keys). Scores are rounded to bfloat16, as transformers' eager attention rounds them,
but for layers where they grow large (`Examination.wide_layers`).

oneDNN sums each product of a row in one order, whatever rows stand beside it, unless it stands alone (measured: alike
for 2 to 512 rows, otherwise for one), and a hidden key adds an exact zero. So a row comes out the same to the bit in a
long chunk, in a short one after cached KV, and as a decode. Nobody promises that: worker/identity.py tries it where
somebody relies on it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from worker.attention.backend import AttentionCall
from worker.attention.decodes import DecodeAttention, first_gathered, gathered_blocks
from worker.attention.key_steps import KEY_STEP, padded_keys, round_up
from worker.attention.scores import attend_by_scores
from worker.attention.scratch import Scratch
from worker.attention.step_layout import SequenceRows, StepLayout
from worker.kv_cache import LayerCache, blocks_of_heads, of_every_head

_MOST_TILE_ROWS = 128
_ROW_STEP = 32
_FEW_ROWS = (8, 16)
"""Sizes of short tiles (measured: a step of 16 rows after 4,080 tokens takes 0.74 of what it takes padded to 32)."""
_SCORES_AT_ONCE = 1 << 21
"""4 MiB of scores and as much of weights stay in the CPU's cache between two passes."""


class TileAttention:
    """Attends for a whole step: chunks tile by tile, decodes together."""

    def __init__(self, wide_layers: Collection[int]) -> None:
        self._wide_layers = wide_layers
        self._scratch = Scratch(torch.bfloat16)
        self._decodes = DecodeAttention(self._scratch)

    def attend(self, call: AttentionCall, step: StepLayout, layer: LayerCache, query: Tensor, out: Tensor) -> None:
        """query [num_heads, rows of the step, key_dim] -> into out [rows of the step, num_heads, value_dim].

        K and V of the rows are in the cache.
        """
        by_scores = call.softcap is not None or call.sinks is not None or call.layer in self._wide_layers
        alone = [] if by_scores else [sequence for sequence in step.sequences if sequence.num_rows == 1]
        if alone:
            self._decodes.attend(call, step, alone, layer, query, out)
        for sequence in step.sequences:
            if by_scores or sequence.num_rows > 1:
                rows = sequence.rows
                self._attend_chunk(call, step, sequence, layer, query[:, rows], out[rows], by_scores=by_scores)

    def _attend_chunk(
        self,
        call: AttentionCall,
        step: StepLayout,
        sequence: SequenceRows,
        layer: LayerCache,
        query: Tensor,
        out: Tensor,
        *,
        by_scores: bool,
    ) -> None:
        first_key = first_gathered(sequence, call.sliding_window)
        keys, values = self._gather(layer, sequence, first_key, step.block_size)
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
        scores = self._scratch.take("scores", num_kv_heads, group * num_rows, num_keys)
        grouped = padded.view(num_kv_heads, group * num_rows, key_dim)
        torch.baddbmm(scores, grouped, keys.transpose(1, 2), beta=0, alpha=call.scaling, out=scores)
        first_hidden = 0 if call.sliding_window is not None else start // KEY_STEP * KEY_STEP
        hidden = step.hidden(start, num_rows, first_hidden, num_keys, call.sliding_window)
        scores.view(num_kv_heads, group, num_rows, num_keys)[..., first_hidden:].masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1, out=self._scratch.take("weights", *scores.shape))
        out = torch.bmm(weights, values, out=self._scratch.take("out", num_kv_heads, group * num_rows, value_dim))
        return out.view(num_heads, num_rows, value_dim)

    def _gather(
        self, layer: LayerCache, sequence: SequenceRows, first_key: int, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """K and V from `first_key` on, then zeros: [num_kv_heads, keys, dim]."""
        num_seen = sequence.end - first_key
        num_keys = padded_keys(num_seen)
        blocks = gathered_blocks(sequence, first_key, num_keys, block_size)
        num_blocks, _, num_kv_heads, _ = layer.keys.shape
        places = of_every_head(blocks, num_kv_heads, num_blocks).flatten()
        gathered = []
        for name, pool in (("keys", layer.keys), ("values", layer.values)):
            rows = self._scratch.take(name, len(places), block_size, pool.shape[-1])
            torch.index_select(blocks_of_heads(pool), 0, places, out=rows)
            of_heads = rows.view(num_kv_heads, num_keys, pool.shape[-1])
            of_heads[:, num_seen:] = 0  # what stands there was never written, and 0 * NaN is NaN
            gathered.append(of_heads)
        return gathered[0], gathered[1]

    def _padded(self, query: Tensor) -> Tensor:
        """A copy of [num_heads, rows, key_dim] with more rows behind, which hold anything: no row changes another."""
        num_heads, num_rows, key_dim = query.shape
        num_padded = next((few for few in _FEW_ROWS if num_rows <= few), round_up(num_rows, _ROW_STEP))
        rows = self._scratch.take("query", num_heads, num_padded, key_dim)
        rows[:, :num_rows] = query
        return rows


def _tile_rows(num_heads: int, num_keys: int) -> int:
    fitting = _SCORES_AT_ONCE // (num_heads * num_keys) // _ROW_STEP * _ROW_STEP
    return min(max(fitting, _ROW_STEP), _MOST_TILE_ROWS)
