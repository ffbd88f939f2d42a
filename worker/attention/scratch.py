"""Memory that passes from layer to layer: allocated once, for what the largest step needs."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Owns one piece of memory for each name."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pieces: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Uninitialised, valid until the next call with this name."""
        size = torch.Size(shape).numel()
        piece = self._pieces.get(name)
        if piece is None or len(piece) < size:
            piece = self._pieces[name] = torch.empty(1 << (size - 1).bit_length(), dtype=self._dtype)
        return piece[:size].view(shape)
