"""Token ids to text while they are being generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """The text of one stream of output ids. Special tokens and unknown ids have none.

    Whatever the cuts between calls, the texts joined equal the tokenizer's batch decode of all ids.
    """

    def feed(self, ids: Sequence[int]) -> str:
        """Text that these ids make final. What may still change, as half a character may, is held back."""

    def flush(self) -> str:
        """The rest, at the end of the stream."""
