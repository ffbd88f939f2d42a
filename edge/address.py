"""Where a proxy is: one address of a name."""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """A literal IP address and a port; as text what nginx writes after `server`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
