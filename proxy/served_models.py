"""What own workers and engines serve together: a name that engines serve goes to them, any other one to own workers."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.errors import Unavailable
from proxy.engines.engine_fleet import EngineFleet
from proxy.fleet import Fleet
from proxy.served_name import ServedName


class ServedModels:
    """Both fleets, by the names that clients use."""

    def __init__(self, fleet: Fleet, engines: EngineFleet) -> None:
        self._fleet = fleet
        self._engines = engines

    def names(self) -> Sequence[ServedName]:
        by_name = {served.name: served for served in (*self._fleet.served_names(), *self._engines.served_names())}
        return [by_name[name] for name in sorted(by_name)]

    def named(self, name: str) -> ServedName:
        """Raises what `is_of_engines` raises, and Unavailable while those who serve it are not there."""
        if self.is_of_engines(name):
            self._engines.check(name)
        else:
            self._fleet.model(name)
        return next(served for served in self.names() if served.name == name)

    def is_of_engines(self, name: str) -> bool:
        """Whether a request for it goes to an engine; else it goes to own workers, as if there were no engines.

        Raises ModelNotFound, or Unavailable while it may yet turn out that somebody serves it.
        """
        if self._engines.knows(name):
            return True
        if self._engines.links and not self._fleet.knows(name):
            if self._fleet.registry_read_at is None:
                raise Unavailable("the registered workers are not known yet, try again in a moment")
            self._engines.check(name)
        return False
