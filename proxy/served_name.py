"""One name that a client may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedName:
    """By own workers or by engines."""

    name: str
    created: int
    """Seconds since the epoch: when its first worker started, or what the engine says."""
    max_model_len: int | None
    """The longest context among those that serve it; None if an engine does not tell."""
    root: str
    """The model behind it, which is another name for an alias."""
    parent: str | None = None
    """The base model, where the name is an adapter of it."""
    owned_by: str = "prefixcache"
