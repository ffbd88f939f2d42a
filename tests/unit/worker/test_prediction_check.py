"""A prediction against what was held, and what of it the index is told again."""

from __future__ import annotations

import pytest

from prefixcache.metrics import WorkerMetrics
from tests.support.requests import generate
from worker.index_changes import IndexChanges
from worker.prediction_check import PredictionCheck
from worker.runner import RunnerLimits
from worker.sequence import Sequence

LIMITS = RunnerLimits(block_size=16, num_blocks=100, max_model_len=1_600, vocab_size=2_000, kv_bytes_per_token=1)
INCARNATION = 7
PROMPT = list(range(400))


def sequence_of(prompt: list[int], *, cached: int, predicted: int | None, predicted_for: int = INCARNATION) -> Sequence:
    request = generate("a", prompt, predicted_hit_tokens=predicted, predicted_for=predicted_for)
    sequence = Sequence("owner", request, LIMITS, arrived_at=0.0)
    assert cached % 16 == 0
    if cached:
        sequence.reuse(list(range(cached // 16)))
    return sequence


def index_block(sequence: Sequence, number: int) -> int:
    return sequence.block_hash(4 * number + 3)


class Checked:
    """What became of one prediction; the pool holds the index blocks that are cached."""

    def __init__(self, sequence: Sequence) -> None:
        self.metrics = WorkerMetrics()
        changes = IndexChanges()
        changes.restart(INCARNATION)
        for number in range(sequence.cached_tokens // 64):
            changes.store(index_block(sequence, number))
        changes.take(1_000)
        PredictionCheck(changes, self.metrics, block_size=16, stride=4).check(sequence)
        self.stored, self.removed = changes.take(1_000)

    def count(self, outcome: str) -> float | None:
        labels = {"outcome": outcome}
        return self.metrics.registry.get_sample_value("prefixcache_worker_predictions_total", labels)

    def repaired(self, change: str) -> float | None:
        labels = {"change": change}
        return self.metrics.registry.get_sample_value("prefixcache_worker_repaired_claims_total", labels)

    @property
    def outcomes(self) -> dict[str, float | None]:
        return {name: count for name in ("right", "too_many", "too_few") if (count := self.count(name)) != 0}


@pytest.mark.parametrize(("cached", "predicted"), [(0, 0), (64, 64), (112, 64), (48, 0), (384, 384)])
def test_right_is_up_to_less_than_one_index_block_more(cached: int, predicted: int) -> None:
    checked = Checked(sequence_of(PROMPT, cached=cached, predicted=predicted))
    assert checked.outcomes == {"right": 1}
    assert (checked.stored, checked.removed) == ([], [])


def test_claims_past_what_is_held_are_removed() -> None:
    sequence = sequence_of(PROMPT, cached=144, predicted=320)
    checked = Checked(sequence)
    assert checked.outcomes == {"too_many": 1}
    assert checked.removed == [index_block(sequence, number) for number in (2, 3, 4)]
    assert checked.stored == []
    assert (checked.repaired("removed"), checked.repaired("stored")) == (3, 0)


def test_blocks_past_the_prediction_are_stored_once_more() -> None:
    sequence = sequence_of(PROMPT, cached=272, predicted=64)
    checked = Checked(sequence)
    assert checked.outcomes == {"too_few": 1}
    assert checked.stored == [index_block(sequence, number) for number in (1, 2, 3)]
    assert checked.removed == []
    assert (checked.repaired("removed"), checked.repaired("stored")) == (0, 3)


def test_an_index_block_that_was_predicted_but_for_the_last_token_is_removed_as_well() -> None:
    sequence = sequence_of(list(range(128)), cached=0, predicted=112)
    assert Checked(sequence).removed == [index_block(sequence, 0), index_block(sequence, 1)]


def test_a_prediction_past_the_full_index_blocks_names_no_block_that_is_none() -> None:
    sequence = sequence_of(list(range(100)), cached=0, predicted=100)
    assert Checked(sequence).removed == [index_block(sequence, 0)]


@pytest.mark.parametrize(
    "sequence",
    [
        sequence_of(PROMPT, cached=0, predicted=None),
        sequence_of(PROMPT, cached=0, predicted=384, predicted_for=INCARNATION - 1),
        sequence_of(PROMPT, cached=384, predicted=0, predicted_for=0),
    ],
    ids=["none", "of an earlier incarnation", "of no incarnation"],
)
def test_what_was_not_read_of_this_incarnation_is_passed_over(sequence: Sequence) -> None:
    checked = Checked(sequence)
    assert checked.outcomes == {}
    assert (checked.stored, checked.removed) == ([], [])
