"""The packed step: rows of several sequences side by side in one forward.

    rows        [ A A A A A A A | B | C | D D D | . . . . ]    A: fresh prefill, B, C: decode, D: chunk after cached KV
    positions     0 1 2 3 4 5 6   41  7   16 17 18  0 0 0 0    counted within each sequence
    slots       where each row's K and V are written in the KV cache

The rows at the end are padding: they belong to no sequence and have no slot. oneDNN compiles kernels for every number
of rows that it meets and keeps them (measured: 3 MB), so it meets few; and never one row alone, whose sums it makes in
another order than those of many (measured: with 4 rows all served families round alike, with 2 not).

Everything here is made once per step and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.kv_cache import CPU
from worker.runner import StepShare

_FEW_ROWS = (0, 4, 8)
_ROW_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows of one sequence.

    keys     0 ........ start ........ end        end = start + num_rows
             ^ in the cache  ^ these rows, written to the cache too
    """

    first_row: int
    num_rows: int
    start: int
    blocks: Tensor  # [ceil(end / block_size)] ids of the blocks that hold keys 0 .. end

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    def first_key(self, sliding_window: int | None) -> int:
        """First position that any of the rows attends to; row at position p sees keys > p - sliding_window."""
        return 0 if sliding_window is None else max(0, self.start - sliding_window + 1)

    def masks_by_causality_alone(self, sliding_window: int | None) -> bool:
        return sliding_window is None or self.end <= sliding_window


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """What the model's forward and the attention backend need to know of a step."""

    token_ids: Tensor  # [padded rows]
    positions: Tensor  # [padded rows]
    slots: Tensor  # [num_rows]
    sampled_rows: Tensor  # [padded samples] rows whose logits are wanted, the first `num_samples` of them
    num_samples: int
    sequences: tuple[SequenceRows, ...]
    block_size: int
    _hidden: dict[tuple[int, int, int, int, int | None], Tensor] = field(default_factory=dict)
    _masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows that belong to a sequence; they come first."""
        return len(self.slots)

    @classmethod
    def pack(cls, shares: Sequence[StepShare], block_size: int, device: torch.device = CPU) -> StepLayout:
        """What the model's forward takes goes to `device`; the sequences' own tables stay in main memory."""
        token_ids: list[int] = []
        sampled_rows: list[int] = []
        positions: list[Tensor] = []
        slots: list[Tensor] = []
        sequences: list[SequenceRows] = []
        for share in shares:
            first_row = len(token_ids)
            token_ids.extend(share.token_ids)
            num_rows = len(token_ids) - first_row
            end = share.start + num_rows
            assert num_rows and len(share.block_table) * block_size >= end, "a share is empty or outgrew its blocks"
            blocks = torch.tensor(share.block_table[: -(-end // block_size)])
            where = torch.arange(share.start, end)
            positions.append(where)
            slots.append(blocks[where // block_size] * block_size + where % block_size)
            sequences.append(SequenceRows(first_row=first_row, num_rows=num_rows, start=share.start, blocks=blocks))
            if share.sample is not None:
                sampled_rows.append(len(token_ids) - 1)
        num_samples = len(sampled_rows)
        padding = [0] * (padded_rows(len(token_ids)) - len(token_ids))
        sampled_rows += [0] * (padded_rows(num_samples) - num_samples)
        return cls(
            token_ids=torch.tensor(token_ids + padding).to(device),
            positions=torch.cat((*positions, torch.tensor(padding, dtype=torch.int64))).to(device),
            slots=torch.cat(slots).to(device),
            sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64).to(device),
            num_samples=num_samples,
            sequences=tuple(sequences),
            block_size=block_size,
        )

    def hidden(self, start: int, num_rows: int, first_key: int, num_keys: int, sliding_window: int | None) -> Tensor:
        """[num_rows, num_keys - first_key]: True where the row at place start, start + 1 .. may not see the key.

        Places count from any key; row and key at the same place are the same token. Made once a step.
        """
        key = (start, num_rows, first_key, num_keys, sliding_window)
        if key not in self._hidden:
            queries = torch.arange(start, start + num_rows).unsqueeze(1)
            keys = torch.arange(first_key, num_keys)
            hidden = keys > queries
            if sliding_window is not None:
                hidden |= keys <= queries - sliding_window
            self._hidden[key] = hidden
        return self._hidden[key]

    def mask(self, start: int, num_rows: int, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """[num_rows, start + num_rows]: 0 where the row may attend to the key, else -inf.

        A float mask, because SDPA turns a boolean one into floats again in every layer.
        """
        key = (start, num_rows, sliding_window, dtype)
        if key not in self._masks:
            hidden = self.hidden(start, num_rows, 0, start + num_rows, sliding_window)
            self._masks[key] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self._masks[key]


def padded_rows(num_rows: int) -> int:
    """The next larger number of rows for which oneDNN compiles its kernels."""
    return next((size for size in _FEW_ROWS if num_rows <= size), -(-num_rows // _ROW_STEP) * _ROW_STEP)
