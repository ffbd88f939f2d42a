"""Which proxies get requests: those that say they are ready, or all of them while none does.

of one address      resolves   says            stands in the list
                    no         -               no
                    yes        ready           yes
                    yes        not ready       no: it ends soon, or has no worker
                    yes        refused         no: nobody listens there
                    yes        silent          as before, at the EDGE_SILENT_LOOKS-th time in a row no

While nobody is ready all that resolve stand in it, so that a client reads in a proxy's own words why. A proxy that was
ready and goes without having said that it is not is lost: killed, hung, or cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from edge.address import Address
from prefixcache.limits import EDGE_SILENT_LOOKS


class Word(Enum):
    """What a proxy said to GET /ready."""

    READY = auto()
    NOT_READY = auto()
    REFUSED = auto()
    SILENT = auto()


class Roster:
    """The list, and what must be remembered from look to look."""

    def __init__(self) -> None:
        self._ready: frozenset[Address] = frozenset()
        self._silent: dict[Address, int] = {}
        self.num_lost = 0
        """Proxies lost so far; one that comes back and goes again counts twice."""

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def look(self, words: Mapping[Address, Word]) -> tuple[Address, ...]:
        """The list after a look at all addresses that resolve, in an order that does not change."""
        self._silent = {
            address: self._silent.get(address, 0) + 1 for address, word in words.items() if word is Word.SILENT
        }
        ready = frozenset(address for address, word in words.items() if self._is_ready(address, word))
        self.num_lost += sum(words.get(address) is not Word.NOT_READY for address in self._ready - ready)
        self._ready = ready
        return tuple(sorted(self._ready or words))

    def _is_ready(self, address: Address, word: Word) -> bool:
        if word is Word.SILENT:
            return address in self._ready and self._silent[address] < EDGE_SILENT_LOOKS
        return word is Word.READY
