"""Where a transformers model meets the KV cache: one attention function for every layer of every family.

transformers calls the function registered under the name in `config._attn_implementation`. It hands over what the
layer itself knows; what the step knows reaches the backend through a context variable, because extra keyword arguments
of the model's forward do not arrive in every family (StableLm and Nemotron drop them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from prefixcache.errors import ConfigError
from worker.attention.step_layout import StepLayout
from worker.kv_cache import LayerShape

IMPLEMENTATION = "prefixcache"
"""The name under which models find the attention function. No mask function stands under it, so no mask is built."""


class UnsupportedAttention(ConfigError):
    """The model asks its attention function for something that would be computed wrongly here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """How one layer wants its scores made. Taken from each call: families differ, and so do layers of one model."""

    layer: int
    scaling: float
    sliding_window: int | None
    """A row at position p sees keys > p - sliding_window; None sees all keys before it."""
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: Tensor | None  # [num_heads] logit of a key without value, per head


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What the layers of a model ask of their attention function and keep of a token."""

    calls: Mapping[int, AttentionCall]
    shapes: Mapping[int, LayerShape]
    wide_layers: frozenset[int] = frozenset()
    """Those whose scores grow too large to be rounded to bfloat16."""


class AttentionBackend(Protocol):
    """Computes causal attention of a packed step over cached and new KV."""

    def attend(self, call: AttentionCall, step: StepLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes the rows' K and V into the cache, then attends, each row to its own sequence only.

        Rows past `step.num_rows` belong to no sequence: nothing of them is written, and what comes out is 0.
        query [1, num_heads, num_rows, key_dim], key [1, num_kv_heads, num_rows, key_dim], value [1, num_kv_heads,
        num_rows, value_dim] -> [1, num_rows, num_heads, value_dim]. Query head h uses KV head h // (num_heads /
        num_kv_heads). May raise UnsupportedAttention, always or never for the same call of the same model.
        """


_active: ContextVar[tuple[AttentionBackend, StepLayout]] = ContextVar("active attention step")


def register() -> None:
    """Makes IMPLEMENTATION known to transformers; calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _attend)


@contextmanager
def attending(backend: AttentionBackend, step: StepLayout) -> Iterator[None]:
    """Every attention call of a model's forward inside this block goes to `backend`."""
    token = _active.set((backend, step))
    try:
        yield
    finally:
        _active.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_other: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: (query, key, value) [1, heads, rows, dim] -> ([1, rows, heads, dim], no weights)."""
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedAttention(f"{type(module).__name__} does not say which layer it is")
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedAttention(f"layer {layer} brings its own mask or position bias")
    if dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttention(f"layer {layer} is not causal or drops out")
    backend, step = _active.get()
    call = AttentionCall(
        layer=layer,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return backend.attend(call, step, query, key, value), None
