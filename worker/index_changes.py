"""What the index must still learn of the pool: the border between step thread and publisher.

    step thread                              publisher
      store(h), remove(h)  ──► net changes ──► take(limit): told to the index, in numbered batches
      repair(hashes)                held     ──► restart(incarnation): a new one is told everything held

The changes are a set, not a queue: a hash stored and removed again before it was taken leaves nothing behind, so the
memory is bounded by the pool and what is being repaired. Every method holds the one lock for set operations only.

A repair tells the index once more what is true of a hash, because somebody read something else there. Whether it stands
in the index is then not known any more, so until it was told, no change of it cancels another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """How many hashes the index is told again."""

    num_stored: int
    num_removed: int


class IndexChanges:
    """Net changes of the index block hashes held, since they were last taken."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[int, None] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._doubtful: set[int] = set()
        """Of those to be told: what of them stands in the index is not known."""
        self._incarnation: int | None = None

    def store(self, value: int) -> None:
        """An index block became full. Called by the step thread."""
        with self._lock:
            self._held[value] = None
            self._change(value, self._stored, self._removed)

    def remove(self, value: int) -> None:
        """An index block lost its content. Called by the step thread."""
        with self._lock:
            del self._held[value]
            self._change(value, self._removed, self._stored)

    def _change(self, value: int, to: dict[int, None], opposite: dict[int, None]) -> None:
        if value not in opposite:
            to[value] = None
            return
        del opposite[value]
        if value in self._doubtful:
            to[value] = None

    def is_of(self, incarnation: int) -> bool:
        """Whether that is the incarnation under which the index is told."""
        return incarnation == self._incarnation

    def repair(self, incarnation: int, values: Iterable[int]) -> Repaired:
        """The index said something else of these hashes under that incarnation; called by the step thread.

        What is to be told anyway, or was said of another incarnation, is left as it is.
        """
        num_stored = num_removed = 0
        with self._lock:
            if not self.is_of(incarnation):
                return Repaired(num_stored=0, num_removed=0)
            for value in values:
                if value in self._stored or value in self._removed:
                    continue
                self._doubtful.add(value)
                if value in self._held:
                    self._stored[value] = None
                    num_stored += 1
                else:
                    self._removed[value] = None
                    num_removed += 1
        return Repaired(num_stored=num_stored, num_removed=num_removed)

    def take(self, limit: int) -> tuple[list[int], list[int]]:
        """At most `limit` changes as (stored, removed), oldest first; the caller owns them from here on."""
        with self._lock:
            removed = _pop_oldest(self._removed, limit)
            stored = _pop_oldest(self._stored, limit - len(removed))
            self._doubtful.difference_update(removed, stored)
            return stored, removed

    def restart(self, incarnation: int) -> None:
        """From now on the changes are those against an index that knows nothing of this incarnation."""
        with self._lock:
            self._incarnation = incarnation
            self._stored = dict(self._held)
            self._removed = {}
            self._doubtful = set()

    def held(self) -> set[int]:
        """Every index block hash held now."""
        with self._lock:
            return set(self._held)

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed)


def _pop_oldest(values: dict[int, None], limit: int) -> list[int]:
    taken = list(values) if len(values) <= limit else [value for value, _ in zip(values, range(limit), strict=False)]
    for value in taken:
        del values[value]
    return taken
