"""What is configured about plain engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proxy.engines.http_pool import EngineTimeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """No engine is the default: then everything goes to own workers."""

    urls: Sequence[str] = ()
    tokenizer: Path | None = None
    """Folder with the tokenizer of their model; None chains the bytes of the request instead."""
    capacity_blocks: int | None = None
    """KV blocks of each engine that does not tell its own; None takes them for ample."""
    timeouts: EngineTimeouts = field(default_factory=EngineTimeouts)
    passed_headers: frozenset[bytes] = frozenset()
    """Names, in lower case, of headers that pass between clients and engines besides the known ones."""
    api_key: str | None = field(default=None, repr=False)
    """What engines are asked with how they are; a request carries the key of its client."""
