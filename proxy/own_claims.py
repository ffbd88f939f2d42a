"""Pending claims of this process itself: what its requests in flight will have stored, known before any index says so.

A burst of equal prompts is matched before the first of them is committed. Each of them finds those before it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefixcache.index.boundaries import Boundaries


class OwnClaims:
    """By boundary block and incarnation, the numbers of the requests placed there; the lower number came first."""

    def __init__(self) -> None:
        self._numbers: dict[int, dict[int, dict[int, None]]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, boundaries: Boundaries, incarnation: int, number: int) -> None:
        for block in boundaries.hashes:
            self._numbers.setdefault(block, {}).setdefault(incarnation, {})[number] = None

    def remove(self, boundaries: Boundaries, incarnation: int, number: int) -> None:
        """Of what was added with the same arguments."""
        for block in boundaries.hashes:
            by_incarnation = self._numbers[block]
            numbers = by_incarnation[incarnation]
            del numbers[number]
            if not numbers:
                del by_incarnation[incarnation]
            if not by_incarnation:
                del self._numbers[block]

    def depths(self, boundaries: Boundaries, before: int) -> Mapping[int, int]:
        """Deepest boundary on which each incarnation has a claim of a request numbered lower than `before`.

        Those that came later count on the request itself where it is, and must not make it stay there.
        """
        return {
            incarnation: depth
            for depth, block in zip(boundaries.depths, boundaries.hashes, strict=True)
            for incarnation, numbers in self._numbers.get(block, {}).items()
            if any(number < before for number in numbers)
        }
