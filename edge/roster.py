"""Which proxies get requests: those that say they are ready, or all of them while none does.

of one address      resolves   says            stands in the list
                    no         -               no
                    yes        ready           yes
                    yes        not ready       no: it ends soon, or has no worker
                    yes        refused         no: nobody listens there
                    yes        silent          as before, at the EDGE_SILENT_LOOKS-th time in a row no

While nobody is ready all that resolve stand in it, so that a client reads in a proxy's own words why. A proxy that was
ready and goes without having said itself that it is not is lost: killed, hung, or cut off. It may be back by the next
look, as another process: what that one says is no word of the lost one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from edge.address import Address
from prefixcache.limits import EDGE_SILENT_LOOKS


class Word(Enum):
    """What a proxy said to GET /ready."""

    READY = auto()
    NOT_READY = auto()
    REFUSED = auto()
    SILENT = auto()


@dataclass(frozen=True, slots=True)
class Saying:
    word: Word
    process: str = ""
    """Whose word it is; "" if it does not tell, as a proxy of an earlier version."""


_GONE = Saying(Word.REFUSED)
"""An address that does not resolve any more."""


class Roster:
    """The list, and what must be remembered from look to look."""

    def __init__(self) -> None:
        self._ready: dict[Address, str] = {}
        """The process of each."""
        self._silent: dict[Address, int] = {}
        self.num_lost = 0
        """Proxies lost so far; one that comes back and goes again counts twice."""

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def look(self, sayings: Mapping[Address, Saying]) -> tuple[Address, ...]:
        """The list after a look at all addresses that resolve, in an order that does not change."""
        self._silent = {
            address: self._silent.get(address, 0) + 1
            for address, saying in sayings.items()
            if saying.word is Word.SILENT
        }
        ready = {
            address: saying.process or self._ready.get(address, "")
            for address, saying in sayings.items()
            if self._is_ready(address, saying.word)
        }
        self.num_lost += sum(
            _is_lost(process, sayings.get(address, _GONE), is_ready=address in ready)
            for address, process in self._ready.items()
        )
        self._ready = ready
        return tuple(sorted(self._ready or sayings))

    def _is_ready(self, address: Address, word: Word) -> bool:
        if word is Word.SILENT:
            return address in self._ready and self._silent[address] < EDGE_SILENT_LOOKS
        return word is Word.READY


def _is_lost(process: str, saying: Saying, *, is_ready: bool) -> bool:
    """Of a process that was ready, by what is said at its address now."""
    is_another = bool(process and saying.process) and saying.process != process
    return is_another or not (is_ready or saying.word is Word.NOT_READY)
