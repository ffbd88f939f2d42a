"""The packed step: rows of several sequences side by side in one forward, without padding.

    rows        [ A A A A A A A | B | C | D D D ]        A: a fresh prefill, B and C: decode, D: a chunk after cached KV
    positions     0 1 2 3 4 5 6   41  7   16 17 18       counted within each sequence
    slots       where each row's K and V are written in the KV cache

Everything here is made once per step and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.runner import StepShare


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

    token_ids: Tensor  # [num_rows]
    positions: Tensor  # [num_rows]
    slots: Tensor  # [num_rows]
    sampled_rows: Tensor  # [num_samples] rows whose logits are wanted
    sequences: tuple[SequenceRows, ...]
    block_size: int
    _masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @classmethod
    def pack(cls, shares: Sequence[StepShare], block_size: int) -> StepLayout:
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
        return cls(
            token_ids=torch.tensor(token_ids),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64),
            sequences=tuple(sequences),
            block_size=block_size,
        )

    def mask(self, sequence: SequenceRows, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """[num_rows, end - first_key]: 0 where the row may attend to the key, else -inf.

        A float mask, because SDPA turns a boolean one into floats again in every layer.
        """
        key = (sequence.first_row, sliding_window, dtype)
        if key not in self._masks:
            queries = torch.arange(sequence.start, sequence.end).unsqueeze(1)
            keys = torch.arange(sequence.first_key(sliding_window), sequence.end)
            hidden = keys > queries
            if sliding_window is not None:
                hidden |= keys <= queries - sliding_window
            self._masks[key] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return self._masks[key]
