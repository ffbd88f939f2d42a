"""Linear layers in bfloat16 on a CPU, their weights in the order in which oneDNN reads them.

Of plain weights oneDNN makes such a copy in every call. Measured on one core with avx512_bf16: for 1, 8, 32, 128 and
512 rows a layer of 576 x 1,536 then takes 2.0, 2.0, 1.4, 1.1 and 1.05 times as long. The products are the same to the
bit. Packed weights take the place of the plain ones; an output layer tied to the embeddings is one copy more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_COMPARED_ROWS = (1, 2, 33)
"""oneDNN has different kernels for one row, for few and for more."""


class PackedLinear(nn.Module):
    """A linear layer without gradients."""

    weight: Tensor
    """Shape and dtype alone, on the device `meta`: some families look at them."""
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        """Raises RuntimeError where this build of torch, or this CPU, cannot pack it."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("weight", torch.empty_like(layer.weight, device="meta"), persistent=False)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach(), persistent=False)
        # The number of rows it is told makes no difference to the order.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 1)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, rows: Tensor) -> Tensor:
        """[.., in_features] -> [.., out_features]"""
        product: Tensor = self._product(rows, self._packed, self.bias, "none", [], "")
        return product


@torch.inference_mode()
def pack_linear_layers(model: nn.Module) -> int:
    """Puts a PackedLinear in the place of every linear layer in bfloat16 on a CPU; returns how many there are.

    Subclasses of nn.Linear stay: they compute something of their own. So does a layer whose products would differ.
    """
    packed: dict[nn.Linear, PackedLinear | None] = {}
    for parent, name, layer in _linear_layers(model):
        if layer not in packed:
            packed[layer] = _packed(layer)
        if (replacement := packed[layer]) is not None:
            setattr(parent, name, replacement)
    num_packed = sum(each is not None for each in packed.values())
    if num_packed < len(packed):
        logger.info("%d of %d linear layers cannot be packed here", len(packed) - num_packed, len(packed))
    if num_packed:
        packed.clear()
        _leave_the_file(model)
    return num_packed


def _leave_the_file(model: nn.Module) -> None:
    """Copies what is still read from the mapped weights file: for its sake all that was read would stay in memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):  # named_children leaves out what it has named
            if type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu":
                yield parent, name, layer


def _packed(layer: nn.Linear) -> PackedLinear | None:
    try:
        packed = PackedLinear(layer)
        alike = all(_is_same(layer, packed, num_rows) for num_rows in _COMPARED_ROWS)
    except (RuntimeError, AttributeError):
        return None
    return packed if alike else None


def _is_same(layer: nn.Linear, packed: PackedLinear, num_rows: int) -> bool:
    rows = torch.linspace(-1, 1, num_rows * layer.in_features, dtype=layer.weight.dtype).view(num_rows, -1)
    return torch.equal(layer(rows), packed(rows))
