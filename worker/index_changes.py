"""What the index must still learn of the pool: the border between step thread and publisher.

    step thread                              publisher
      store(h), remove(h)  ──► net changes ──► take(limit): told to the index, in numbered batches
                               held          ──► restart(): a new incarnation is told everything held

The changes are a set, not a queue: a hash stored and removed again before it was taken leaves nothing behind, so the
memory is bounded by the pool. Every method holds the one lock for set operations only.
"""

from __future__ import annotations

from threading import Lock


class IndexChanges:
    """Net changes of the index block hashes held, since they were last taken."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[int, None] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def store(self, value: int) -> None:
        """An index block became full. Called by the step thread."""
        with self._lock:
            self._held[value] = None
            if value in self._removed:
                del self._removed[value]
            else:
                self._stored[value] = None

    def remove(self, value: int) -> None:
        """An index block lost its content. Called by the step thread."""
        with self._lock:
            del self._held[value]
            if value in self._stored:
                del self._stored[value]
            else:
                self._removed[value] = None

    def take(self, limit: int) -> tuple[list[int], list[int]]:
        """At most `limit` changes as (stored, removed), oldest first; the caller owns them from here on."""
        with self._lock:
            removed = _pop_oldest(self._removed, limit)
            return _pop_oldest(self._stored, limit - len(removed)), removed

    def restart(self) -> None:
        """From now on the changes are those against an index that knows nothing."""
        with self._lock:
            self._stored = dict(self._held)
            self._removed = {}

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
