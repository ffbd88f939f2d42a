"""Which linear layers are given the very same rows, found out by running the model.

Q, K and V, or gate and up: families name them differently, and few say which of them read one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

_FAILURES = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What the forward of a model that needs something else may raise; whether it is served is decided elsewhere."""

Siblings = tuple[nn.Linear, ...]
"""In the order of their calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    layer: nn.Linear
    rows: Tensor
    """Kept until all is seen, so that no other tensor gets its id."""
    version: int
    """How often the rows had been changed in place."""


def find_siblings(parents: Mapping[nn.Linear, nn.Module], forward: Callable[[], object]) -> list[Siblings]:
    """Layers of one parent that `forward` gives the very same tensor, unchanged, one after the other in every call.

    `parents` holds the layers to look at, each with the module that it is a child of. None if `forward` fails.
    """
    if not parents:
        return []
    calls: list[_Call] = []

    def record(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        if args:
            calls.append(_Call(layer=layer, rows=args[0], version=args[0]._version))

    hooks = [layer.register_forward_pre_hook(record) for layer in parents]
    try:
        with torch.inference_mode(mode=False), torch.no_grad():  # tensors of inference mode have no version
            forward()
    except _FAILURES:
        return []
    finally:
        for hook in hooks:
            hook.remove()
    runs = groupby(calls, key=lambda call: (parents[call.layer], id(call.rows), call.version))
    return _always_together([tuple(call.layer for call in run) for _, run in runs])


def _always_together(runs: Iterable[Siblings]) -> list[Siblings]:
    runs_of: dict[nn.Linear, set[Siblings]] = {}
    distinct = dict.fromkeys(runs)
    for run in distinct:
        for layer in run:
            runs_of.setdefault(layer, set()).add(run)
    return [run for run in distinct if len(set(run)) == len(run) > 1 and all(len(runs_of[layer]) == 1 for layer in run)]
