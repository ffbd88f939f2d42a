"""When nginx may take a new list: at once as a rule, seldom while the list changes again and again."""

from __future__ import annotations

from collections import deque

from prefixcache.limits import EDGE_CALM_S, EDGE_RELOADS, EDGE_RELOADS_S


class ReloadPace:
    """Every list is a generation of processes that stay until their streams have ended: there must not be too many."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=EDGE_RELOADS)

    def allows(self, now: float) -> bool:
        if len(self._times) < EDGE_RELOADS or now - self._times[0] >= EDGE_RELOADS_S:
            return True
        return now - self._times[-1] >= EDGE_CALM_S

    def reloaded(self, now: float) -> None:
        self._times.append(now)
