"""Linear layers in bfloat16 on a CPU, their weights in the order in which oneDNN reads them.

Of plain weights oneDNN makes such a copy in every call. Measured on one core with avx512_bf16: for 1, 8, 32, 128 and
512 rows a layer of 576 x 1,536 then takes 2.0, 2.0, 1.4, 1.1 and 1.05 times as long. The products are the same to the
bit. Packed weights take the place of the plain ones; an output layer tied to the embeddings is one copy more.

Every product costs some 17 us besides, so small layers that read the same rows, as Q, K and V do, have one product
together, of which each takes its columns. Measured with SmolLM2-135M on one core: steps of 1 and 8 decodes after 160
tokens take 32.8 and 43.1 ms in place of 33.8 and 44.5, one of 512 rows of a prompt up to 1 % longer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from worker.sibling_layers import Siblings, find_siblings

logger = logging.getLogger(__name__)

_COMPARED_ROWS = (1, 2, 33)
"""oneDNN has different kernels for one row, for few and for more."""
_MANY_ROWS = 200
"""Compared as well where layers become one product: it may be cut into other tiles than theirs."""

_MOST_JOINT_WEIGHTS = 2**20
"""Layers that have more together stay apart: what is saved is little beside their product, and to read columns of wide
rows costs more. Gate and up, 576 x 1,536 each, of 30 layers save 0.4 ms of a decode and cost 15 of 715 of 512 rows."""

Product = Callable[[Tensor], Tensor]
"""[.., in_features] -> [.., out_features]"""


class PackedLinear(nn.Module):
    """A linear layer without gradients."""

    weight: Tensor
    """Shape and dtype alone, on the device `meta`: some families look at them."""
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, product: Product | None = None) -> None:
        """Without a product, one of its own: RuntimeError where this build of torch, or this CPU, cannot pack it."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("weight", torch.empty_like(layer.weight, device="meta"), persistent=False)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach(), persistent=False)
        self._product = _product(layer.weight.detach(), self.bias) if product is None else product

    def forward(self, rows: Tensor) -> Tensor:
        """[.., in_features] -> [.., out_features]"""
        return self._product(rows)


def _product(weight: Tensor, bias: Tensor | None) -> Product:
    # The number of rows it is told makes no difference to the order.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(rows: Tensor) -> Tensor:
        out: Tensor = multiply(rows, packed, bias, "none", [], "")
        return out

    return product


@dataclass(slots=True)
class _Rest:
    """Columns of a product that their layers have not come for."""

    rows: Tensor
    version: int | None
    columns: dict[int, Tensor]


class _JointProduct:
    """The product of layers that are given the same rows: the first one to come computes it, each takes its columns.

    Columns are given for the very tensor that they were computed of and, where torch counts that, only if it was not
    changed in place since. In inference mode nothing counts: there `find_siblings` has seen, counting, that the model
    changes nothing between its calls. Nothing is held once all layers have come, and no columns are given twice.
    """

    def __init__(self, layers: Siblings) -> None:
        """Raises RuntimeError where this build of torch, or this CPU, cannot pack it."""
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self._product = _product(weight, torch.cat(biases) if biases else None)
        self._sizes = [layer.out_features for layer in layers]
        self._rest: _Rest | None = None

    def columns(self, place: int, rows: Tensor) -> Tensor:
        """What the layer at this place of the group makes of the rows; a view."""
        rest, version = self._rest, None if rows.is_inference() else rows._version
        if rest is not None and rest.rows is rows and rest.version == version:
            found = rest.columns.pop(place, None)  # at once, so that no other thread is given them, too
            if found is not None:
                if not rest.columns:
                    self._rest = None
                return found
        columns = dict(enumerate(self._product(rows).split_with_sizes(self._sizes, -1)))
        own = columns.pop(place)
        self._rest = _Rest(rows, version, columns)
        return own


@torch.inference_mode()
def pack_linear_layers(model: nn.Module, forward: Callable[[], object]) -> int:
    """Puts a PackedLinear in the place of every linear layer in bfloat16 on a CPU; returns how many there are.

    `forward` runs the model over a few tokens: small layers that are given the same rows there share a product.
    Subclasses of nn.Linear stay: they compute something of their own. So does a layer whose products would differ.
    """
    packed: dict[nn.Linear, PackedLinear | None] = {**_with_joint_products(model, forward)}
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


def _with_joint_products(model: nn.Module, forward: Callable[[], object]) -> dict[nn.Linear, PackedLinear]:
    parents = {layer: parent for parent, _, layer in _linear_layers(model)}
    packed: dict[nn.Linear, PackedLinear] = {}
    for siblings in find_siblings(parents, forward):
        packed.update(_packed_jointly(siblings))
    return packed


def _packed_jointly(siblings: Siblings) -> dict[nn.Linear, PackedLinear]:
    """Nothing, where they have to be packed one by one."""
    mixed = len({layer.bias is None for layer in siblings}) > 1
    if mixed or sum(layer.weight.numel() for layer in siblings) > _MOST_JOINT_WEIGHTS:
        return {}
    try:
        joint = _JointProduct(siblings)
        packed = {layer: PackedLinear(layer, partial(joint.columns, place)) for place, layer in enumerate(siblings)}
        alike = all(_are_same(packed, num_rows) for num_rows in (*_COMPARED_ROWS, _MANY_ROWS))
    except (RuntimeError, AttributeError):
        return {}
    return packed if alike else {}


def _packed(layer: nn.Linear) -> PackedLinear | None:
    try:
        packed = PackedLinear(layer)
        alike = all(_are_same({layer: packed}, num_rows) for num_rows in _COMPARED_ROWS)
    except (RuntimeError, AttributeError):
        return None
    return packed if alike else None


def _are_same(packed: Mapping[nn.Linear, PackedLinear], num_rows: int) -> bool:
    first = next(iter(packed))
    rows = torch.linspace(-1, 1, num_rows * first.in_features, dtype=first.weight.dtype).view(num_rows, -1)
    return all(torch.equal(plain(rows), ours(rows)) for plain, ours in packed.items())
