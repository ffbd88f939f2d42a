"""Holds what a proxy read in the index against what was really there, and has the index told again where they differ.

    predicted   | 64 | 64 | 64 | 64 |           hit tokens of index blocks that the index claims for this cache
    cached      | 64 | 64 | 16 |                too many: the claims past what is held are removed
    cached      | 64 | 64 | 64 | 64 | 64 |      too few: the blocks past the prediction are stored once more

Only the owner of the claims can mend them: its batches are numbered, so a mend never undoes a change that came later.
A prediction is right when 0 <= cached - predicted < one index block; the difference may also have come about while the
request was on its way, and then the mend tells the index what it knows already.
"""

from __future__ import annotations

from prefixcache.metrics import WorkerMetrics
from worker.index_changes import IndexChanges
from worker.sequence import Sequence


class PredictionCheck:
    """Belongs to the step thread."""

    def __init__(self, changes: IndexChanges, metrics: WorkerMetrics, *, block_size: int, stride: int) -> None:
        self._changes = changes
        self._metrics = metrics
        self._stride = stride
        self._index_block_tokens = block_size * stride
        for outcome in ("right", "too_many", "too_few"):
            metrics.predictions.labels(outcome)
        for change in ("stored", "removed"):
            metrics.repaired_claims.labels(change)

    def check(self, sequence: Sequence) -> None:
        """Of a request that has just been admitted for the first time; one without a prediction is passed over."""
        predicted_tokens, cached_tokens = sequence.predicted_hit_tokens, sequence.cached_tokens
        if predicted_tokens is None or not self._changes.is_of(sequence.predicted_for):
            return
        if 0 <= cached_tokens - predicted_tokens < self._index_block_tokens:
            self._metrics.predictions.labels("right").inc()
            return
        self._metrics.predictions.labels("too_many" if cached_tokens < predicted_tokens else "too_few").inc()
        # A prediction is cut where the last token must be computed, so its last index block may be predicted in part.
        num_full = sequence.num_prompt_tokens // self._index_block_tokens
        num_predicted = min(-(-predicted_tokens // self._index_block_tokens), num_full)
        num_held = cached_tokens // self._index_block_tokens
        first, end = sorted((num_held, num_predicted))
        hashes = [sequence.block_hash(self._stride * place + self._stride - 1) for place in range(first, end)]
        repaired = self._changes.repair(sequence.predicted_for, hashes)
        self._metrics.repaired_claims.labels("stored").inc(repaired.num_stored)
        self._metrics.repaired_claims.labels("removed").inc(repaired.num_removed)
