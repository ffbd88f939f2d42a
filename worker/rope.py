"""Rotary positions that would change with the neighbours of a sequence, held still.

Two rope types of transformers, `dynamic` and `longrope`, choose their frequencies by the greatest position of a whole
forward. In a packed step that is another sequence's: K of the same tokens would differ from step to step, and what is
cached would fit no longer (measured: K of 8 tokens differs by 0.17 and 1.0). So the choice is made once, at load, for
the longest sequence that the worker serves; transformers makes the same one for every sequence of that length. A model
served up to its original length keeps its first frequencies. Other engines do likewise.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

_FROZEN = "frozen"
"""A rope type that transformers' forward does not update."""


def freeze_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """From here on every forward has the frequencies that one over `max_model_len` tokens would choose."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _is_chosen_by_length(rope_type):
            _choose(module, model.device, max_model_len)
            module.rope_type = _FROZEN  # type: ignore[assignment]  # nn.Module declares what it holds as Tensor | Module
        elif isinstance(rope_type, dict):
            for layer_type, kind in rope_type.items():
                if _is_chosen_by_length(kind):
                    _choose(module, model.device, max_model_len, layer_type=layer_type)
                    rope_type[layer_type] = _FROZEN


def _is_chosen_by_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


@torch.inference_mode()
def _choose(module: nn.Module, device: torch.device, length: int, **of_layer_type: str) -> None:
    """Has the module itself choose, by showing it the last position."""
    module(torch.zeros(1, device=device), torch.tensor([[length - 1]], device=device), **of_layer_type)
