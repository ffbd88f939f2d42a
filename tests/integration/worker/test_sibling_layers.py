"""Layers that a model gives the same rows are found, and those alone; what they share is right whoever calls them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiny_models import tiny_model, write_model
from worker import packed_linear
from worker.model_folder import ModelFolder
from worker.model_loader import load_model
from worker.packed_linear import PackedLinear, Product, pack_linear_layers
from worker.sibling_layers import find_siblings

WIDTH = 64
ROWS = (1, 2, 3, 8, 31, 32, 33, 64, 200, 300)


class Trio(nn.Module):
    """Three layers; `way` says how its forward calls them."""

    def __init__(self, way: Callable[[Trio, Tensor], object] | None = None, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.way = way
        self.first, self.second, self.third = (nn.Linear(WIDTH, out, bias=bias) for out in (64, 32, 7))
        self.to(torch.bfloat16).requires_grad_(requires_grad=False)

    def forward(self, rows: Tensor) -> object:
        if self.way is not None:
            return self.way(self, rows)
        return self.first(rows), self.second(rows), self.third(rows)

    @property
    def layers(self) -> list[nn.Module]:
        return [self.first, self.second, self.third]


def random_rows(num_rows: int = 3) -> Tensor:
    return torch.randn(1, num_rows, WIDTH, dtype=torch.bfloat16)


@contextmanager
def products() -> Iterator[list[Tensor]]:
    """Rows of every product of the layers that are packed meanwhile."""
    made: list[Tensor] = []
    plain = packed_linear._product

    def counted(weight: Tensor, bias: Tensor | None) -> Product:
        assert bias is None or len(bias) == len(weight)
        product = plain(weight, bias)

        def count(rows: Tensor) -> Tensor:
            made.append(rows.clone())
            return product(rows)

        return count

    with patch.object(packed_linear, "_product", counted):
        yield made
    made.clear()


def pack(trio: Trio) -> tuple[Trio, list[Tensor]]:
    """A packed copy, and the rows of its products from now on."""
    packed = copy.deepcopy(trio)
    with products() as made:
        assert pack_linear_layers(packed, lambda: packed(random_rows(2))) == 3
    return packed, made


def names(trio: nn.Module, forward: Callable[[], object]) -> list[list[str]]:
    """Of the siblings found among its direct children."""
    of = {layer: name for name, layer in trio.named_children() if isinstance(layer, nn.Linear)}
    return [[of[layer] for layer in group] for group in find_siblings(dict.fromkeys(of, trio), forward)]


# --- what is found ----------------------------------------------------------------------------------------


def _changes_rows(trio: Trio, rows: Tensor) -> None:
    trio.first(rows)
    rows.add_(0)  # the same values, but by luck
    trio.second(rows), trio.third(rows)


def _by_name(trio: Trio, rows: Tensor) -> None:
    trio.first(input=rows)
    trio.second(rows), trio.third(rows)


def _once_apart(trio: Trio, rows: Tensor) -> None:
    trio.first(rows), trio.second(rows)
    trio.first(rows.clone()), trio.third(rows.clone())


WAYS: dict[str, tuple[Callable[[Trio, Tensor], object], list[list[str]]]] = {
    "all": (lambda trio, rows: [each(rows) for each in trio.layers], [["first", "second", "third"]]),
    "in another order": (lambda trio, rows: [each(rows) for each in trio.layers[::-1]], [["third", "second", "first"]]),
    "again and again": (
        lambda trio, rows: [each(copied) for copied in (rows.clone(), rows) for each in trio.layers],
        [["first", "second", "third"]],
    ),
    "two": (lambda trio, rows: (trio.first(rows), trio.second(rows), trio.third(rows.clone())), [["first", "second"]]),
    "equal rows": (lambda trio, rows: [each(rows.clone()) for each in trio.layers], []),
    "views of the same rows": (lambda trio, rows: [each(rows[:]) for each in trio.layers], []),
    "rows changed in place": (_changes_rows, [["second", "third"]]),
    "by name": (_by_name, [["second", "third"]]),
    "twice in a row": (lambda trio, rows: [each(rows) for each in (trio.first, trio.first, trio.second)], []),
    "once apart": (_once_apart, []),
    "one alone": (lambda trio, rows: trio.first(rows), []),
}


@pytest.mark.parametrize("way", WAYS)
def test_siblings_are_those_always_given_the_very_same_rows_one_after_the_other(way: str) -> None:
    calls, found = WAYS[way]
    trio = Trio(calls)
    assert names(trio, lambda: trio(random_rows())) == found
    assert not any(layer._forward_pre_hooks for layer in trio.layers)


def test_without_layers_to_look_at_nothing_is_run() -> None:
    assert find_siblings({}, lambda: pytest.fail("run")) == []


def test_a_forward_that_fails_shows_nothing() -> None:
    trio = Trio()

    def fail() -> None:
        trio(random_rows())
        raise RuntimeError("needs a mask")

    assert names(trio, fail) == []
    assert not any(layer._forward_pre_hooks for layer in trio.layers)


def test_layers_of_different_parents_are_no_siblings() -> None:
    first, second = Trio(), Trio()
    parents = {layer: trio for trio in (first, second) for layer in trio.layers if isinstance(layer, nn.Linear)}

    def forward() -> None:
        rows = random_rows()
        first(rows), second(rows)

    assert find_siblings(parents, forward) == [tuple(first.layers), tuple(second.layers)]


# --- what becomes one product -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_one_product_gives_each_its_own_to_the_bit(*, bias: bool) -> None:
    plain = Trio(bias=bias)
    packed, made = pack(plain)
    for num_rows in ROWS:
        rows = random_rows(num_rows)
        for ours, theirs in zip(packed(rows), plain(rows), strict=True):
            assert torch.equal(ours, theirs), num_rows
            assert torch.equal(ours.view(1, num_rows, -1, 1), theirs.view(1, num_rows, -1, 1))
    assert len(made) == len(ROWS)


def test_shapes_and_biases_stay_those_of_each() -> None:
    plain = Trio(bias=True)
    packed, _ = pack(plain)
    for ours, theirs in zip(packed.layers, plain.layers, strict=True):
        assert isinstance(ours, PackedLinear)
        assert isinstance(theirs, nn.Linear)
        assert (ours.in_features, ours.out_features) == (theirs.in_features, theirs.out_features)
        assert ours.weight.shape == theirs.weight.shape
        assert ours.bias is not None
        assert torch.equal(ours.bias, theirs.bias)


def _one_bias(trio: Trio) -> None:
    trio.second.bias = nn.Parameter(torch.ones(32, dtype=torch.bfloat16), requires_grad=False)


def _two_places(trio: Trio) -> None:
    trio.third = trio.second


@pytest.mark.parametrize("change", [_one_bias, _two_places])
@torch.inference_mode()
def test_what_is_not_alike_has_products_of_its_own(change: Callable[[Trio], None]) -> None:
    plain = Trio()
    change(plain)
    packed = copy.deepcopy(plain)
    with products() as made:
        pack_linear_layers(packed, lambda: packed(random_rows(2)))
    rows = random_rows()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(packed(rows), plain(rows), strict=True))
    assert len(made) == 3


def test_large_layers_stay_apart() -> None:
    with patch.object(packed_linear, "_MOST_JOINT_WEIGHTS", WIDTH * (64 + 32 + 7) - 1):
        packed, made = pack(Trio())
    packed(random_rows())
    assert len(made) == 3


def test_layers_whose_joint_product_differs_for_any_number_of_rows_stay_apart() -> None:
    exact = packed_linear._JointProduct.columns

    def off(self: packed_linear._JointProduct, place: int, rows: Tensor) -> Tensor:
        columns = exact(self, place, rows)
        return columns + 1 if len(rows) == packed_linear._MANY_ROWS and place == 2 else columns

    with patch.object(packed_linear._JointProduct, "columns", off):
        packed, made = pack(Trio())
    packed(random_rows())
    assert len(made) == 3


def test_a_loaded_model_multiplies_q_k_and_v_at_once(tmp_path: Path) -> None:
    folder = ModelFolder.open(write_model(tiny_model("Llama", num_hidden_layers=1), tmp_path))
    with products() as made:
        model = load_model(folder, torch.bfloat16)
        made.clear()
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
        assert len(made) == 5  # Q, K and V; O; gate and up; down; logits


# --- whatever the caller does -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_any_order_of_calls_gives_what_plain_layers_give(mode: Callable[[], torch.inference_mode]) -> None:
    plain = Trio(bias=True)
    packed, _ = pack(plain)
    generator = torch.Generator().manual_seed(11)
    with mode():
        several = [random_rows(1 + each) for each in range(3)]
        for _ in range(300):
            place, which = (int(each) for each in torch.randint(3, (2,), generator=generator))
            out = packed.layers[place](several[which])
            assert torch.equal(out, plain.layers[place](several[which]))
            out.fill_(torch.nan)  # nobody else reads it


@torch.no_grad()
def test_rows_changed_in_place_are_multiplied_anew() -> None:
    plain = Trio()
    packed, _ = pack(plain)
    rows = random_rows()
    packed.first(rows)
    rows[0, 1].mul_(2)
    assert torch.equal(packed.second(rows), plain.second(rows))
    assert torch.equal(packed.third(rows), plain.third(rows))


@torch.inference_mode()
def test_a_product_that_fails_leaves_nothing_behind() -> None:
    plain = Trio()
    packed, _ = pack(plain)
    rows = random_rows()
    packed.first(rows)
    with pytest.raises(RuntimeError):
        packed.second(torch.ones(2, 3, dtype=torch.bfloat16))
    assert torch.equal(packed.second(rows), plain.second(rows))


@torch.inference_mode()
def test_nothing_is_held_once_every_layer_has_its_columns() -> None:
    packed, _ = pack(Trio())
    del _
    gc.disable()
    try:
        rows = random_rows()
        held = [weakref.ref(rows), *map(weakref.ref, packed(rows))]
        del rows
        assert [each() for each in held] == [None] * 4
    finally:
        gc.enable()


@torch.inference_mode()
def test_what_a_layer_did_not_come_for_goes_with_the_next_rows() -> None:
    packed, _ = pack(Trio())
    rows = random_rows()
    held = weakref.ref(rows)
    packed.first(rows)
    del rows
    assert held() is not None
    packed(random_rows())
    assert held() is None


def test_threads_get_products_of_their_own_rows() -> None:
    plain = Trio()
    packed, _ = pack(plain)
    shared = random_rows()

    @torch.inference_mode()
    def compute(seed: int) -> bool:
        own = torch.randn(1, 2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        right = True
        for _ in range(100):
            for rows in (own, shared):
                for ours, theirs in zip(packed(rows), plain(rows), strict=True):
                    right = right and torch.equal(ours, theirs)
                    ours.fill_(torch.nan)
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(compute, range(4)))
