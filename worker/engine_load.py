"""How many requests an engine holds, and how far it is: what its beats say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """At one moment."""

    step: int
    """Counts finished steps."""
    running: int
    waiting: int
    prefilling: int
    """Of those that run: without a first token."""

    @property
    def is_idle(self) -> bool:
        """No request at all."""
        return not self.running and not self.waiting
