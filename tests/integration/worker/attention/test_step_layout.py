"""The packed step, number by number."""

from __future__ import annotations

import pytest
import torch

from tests.support.packed_steps import GREEDY
from worker.attention.step_layout import SequenceRows, StepLayout, padded_rows
from worker.runner import StepShare

INF = float("inf")


def _rows(start: int, num_rows: int) -> SequenceRows:
    return SequenceRows(first_row=0, num_rows=num_rows, start=start, blocks=torch.tensor([0]))


def test_rows_stand_side_by_side() -> None:
    step = StepLayout.pack(
        [
            StepShare(token_ids=[11, 12, 13], start=0, block_table=(5, 9), sample=None),
            StepShare(token_ids=[21], start=6, block_table=(0, 3), sample=GREEDY),
            StepShare(token_ids=[31, 32], start=3, block_table=(7, 2, 8), sample=GREEDY),
        ],
        block_size=4,
    )
    assert step.token_ids.tolist()[: step.num_rows] == [11, 12, 13, 21, 31, 32]
    assert step.positions.tolist()[: step.num_rows] == [0, 1, 2, 6, 3, 4]
    assert step.slots.tolist() == [20, 21, 22, 14, 31, 8]
    assert step.sampled_rows.tolist()[: step.num_samples] == [3, 5]
    assert [sequence.rows for sequence in step.sequences] == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert [sequence.end for sequence in step.sequences] == [3, 7, 5]
    assert [sequence.blocks.tolist() for sequence in step.sequences] == [[5], [0, 3], [7, 2]]


def test_a_step_may_sample_nothing() -> None:
    step = StepLayout.pack([StepShare(token_ids=[1], start=0, block_table=(0,), sample=None)], block_size=4)
    assert step.sampled_rows.shape == (0,)
    assert step.sampled_rows.dtype == torch.int64


@pytest.mark.parametrize(("token_ids", "start", "block_table"), [([], 0, (0,)), ([1, 2], 3, (0,)), ([1], 8, (0, 1))])
def test_a_share_that_is_empty_or_outgrew_its_blocks_is_a_bug(
    token_ids: list[int], start: int, block_table: tuple[int, ...]
) -> None:
    with pytest.raises(AssertionError):
        StepLayout.pack(
            [StepShare(token_ids=token_ids, start=start, block_table=block_table, sample=None)], block_size=4
        )


@pytest.mark.parametrize(
    ("start", "num_rows", "window", "first_key", "causal_alone"),
    [
        (0, 8, None, 0, True),
        (0, 8, 8, 0, True),
        (0, 9, 8, 0, False),
        (7, 1, 8, 0, True),
        (8, 1, 8, 1, False),
        (100, 5, 8, 93, False),
        (100, 5, None, 0, True),
    ],
)
def test_keys_in_sight_of_a_window(
    start: int, num_rows: int, window: int | None, first_key: int, causal_alone: bool
) -> None:
    rows = _rows(start, num_rows)
    assert rows.first_key(window) == first_key
    assert rows.masks_by_causality_alone(window) is causal_alone


def test_rows_and_samples_are_padded_to_few_sizes() -> None:
    """A row of nobody has no slot and belongs to no sequence."""
    share = StepShare(token_ids=[7] * 9, start=3, block_table=(0, 1, 2), sample=GREEDY)
    step = StepLayout.pack([share], block_size=4)
    assert step.num_rows == len(step.slots) == 9
    assert step.token_ids.tolist() == [7] * 9 + [0] * 7
    assert step.positions.tolist() == [*range(3, 12), *[0] * 7]
    assert (step.sampled_rows.tolist(), step.num_samples) == ([8, 0, 0, 0], 1)


def test_no_row_stands_alone_and_sizes_are_few() -> None:
    sizes = [padded_rows(count) for count in range(513)]
    assert sizes[0] == 0
    assert min(sizes[1:]) == 4
    assert all(count <= size < count + 16 for count, size in enumerate(sizes))
    assert len(set(sizes)) == 35


def test_hidden_is_what_comes_later_and_what_left_the_window() -> None:
    share = StepShare(token_ids=[1, 2, 3], start=3, block_table=(0, 1), sample=None)
    step = StepLayout.pack([share], block_size=4)
    assert step.hidden(3, 2, 0, 6, None).tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]
    assert step.hidden(3, 2, 2, 6, 2).tolist() == [[0, 0, 1, 1], [1, 0, 0, 1]]  # keys 2 to 5
    assert step.mask(3, 3, None, torch.float32).tolist() == [
        [0, 0, 0, 0, -INF, -INF],
        [0, 0, 0, 0, 0, -INF],
        [0, 0, 0, 0, 0, 0],
    ]
    assert step.mask(1, 3, 2, torch.bfloat16).tolist() == [
        [0, 0, -INF, -INF],
        [-INF, 0, 0, -INF],
        [-INF, -INF, 0, 0],
    ]


def test_layers_share_a_mask() -> None:
    """So do sequences of which as many keys are seen."""
    share = StepShare(token_ids=[1, 2], start=3, block_table=(0, 1), sample=None)
    step = StepLayout.pack([share, share], block_size=4)
    mask, hidden = step.mask(3, 2, None, torch.float32), step.hidden(3, 2, 0, 5, None)
    assert step.mask(3, 2, None, torch.float32) is mask
    assert step.hidden(3, 2, 0, 5, None) is hidden
    assert step.mask(3, 2, 4, torch.float32) is not mask
    assert step.hidden(2, 2, 0, 5, None) is not hidden
    assert step.mask(3, 2, None, torch.bfloat16).dtype == torch.bfloat16
