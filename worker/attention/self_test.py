"""Whether a loaded model can be served here, found out by running it.

Model families differ in ways that no list keeps up with: some never call the registered attention function, some keep
state beside K and V, some need a mask. Such a family answers fluently and wrongly. So every model is tried at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefixcache.errors import ConfigError
from prefixcache.protocol import Sampling
from worker.attention.backend import (
    IMPLEMENTATION,
    AttentionCall,
    Examination,
    UnsupportedAttention,
    attending,
    register,
)
from worker.attention.scores import largest_score
from worker.attention.sdpa_gather import attend_plainly, hidden_keys
from worker.attention.step_layout import StepLayout
from worker.kv_cache import LayerShape
from worker.model_loader import vocab_size
from worker.runner import SampleSpec, StepShare

BLOCK_SIZE = 16
_CACHED_TOKENS = 8
_CHUNK_TOKENS = 4
_COMPARED = 5
"""Last rows of each sequence: one that ends a chunk, then decode steps."""
_FIRST_TOKENS = _CACHED_TOKENS + _CHUNK_TOKENS + _COMPARED - 1
_SECOND_TOKENS = _FIRST_TOKENS - 1

_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Relative error of a sequence's logits that rounding explains: two right computations of one model differ by about
1e-6 in float32 and (30 layers) 4e-2 in bfloat16; lost state or a bias left out shows as 0.1 to 1."""

_KEY_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Relative error of a layer's K between two steps of the same rows: only experts round differently at all, since their
rows are grouped otherwise; frequencies of another length change K by 0.17 and more."""

_MOST_ROUNDED = 48.0
"""Layers whose scores are larger over the few tokens of the examination keep them in float32. Measured: a model with 24
here and 67 over a long text loses nothing by rounding them to bfloat16, 3 % of its error against float32."""

_FAILURES = (UnsupportedAttention, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What a forward of a model that needs something else may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Logits after the last _COMPARED tokens of two sequences, by the model's own eager attention."""

    first: list[int]
    second: list[int]
    logits: tuple[Tensor, Tensor]  # [_COMPARED, vocab_size] each


class _Recorder:
    """AttentionBackend that keeps no KV and writes down who called; every sequence attends to its own rows only."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.shapes: dict[int, LayerShape] = {}
        self.first_keys: dict[int, Tensor] = {}
        """By layer: K of the first sequence's rows, [num_kv_heads, rows, key_dim]."""
        self.largest: dict[int, float] = {}
        """By layer: the largest size of a score."""

    def attend(self, call: AttentionCall, step: StepLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls.append(call)
        self.shapes[call.layer] = LayerShape(
            num_kv_heads=key.shape[1], key_dim=key.shape[-1], value_dim=value.shape[-1]
        )
        self.first_keys[call.layer] = key[0, :, step.sequences[0].rows]
        self.largest[call.layer] = largest_score(call, query[0], key[0])
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        for sequence in step.sequences:
            rows = sequence.rows
            hidden = hidden_keys(replace(sequence, start=0), call.sliding_window).to(query.device)
            attended = attend_plainly(call, query[0, :, rows], key[0, :, rows], value[0, :, rows], hidden)
            out[0, rows] = attended.transpose(0, 1)
        return out


def examine(model: PreTrainedModel) -> Examination:
    """Gives the model our attention function and runs a few tokens through it.

    Raises ConfigError unless that function is called exactly once by every layer.
    """
    register()
    model.set_attn_implementation(IMPLEMENTATION)
    ids = _token_ids(_CACHED_TOKENS, vocab_size(model), offset=0)
    recorder = _record(model, [StepShare(token_ids=ids, start=0, block_table=(0,), sample=None)])
    num_layers = model.config.get_text_config().num_hidden_layers
    called = sorted(call.layer for call in recorder.calls)
    if called != list(range(num_layers)):
        raise _refusal(
            model, f"{len(set(called))} of its {num_layers} layers called the attention function, {len(called)} calls"
        )
    return Examination(
        calls={call.layer: call for call in recorder.calls},
        shapes=recorder.shapes,
        wide_layers=frozenset(layer for layer, score in recorder.largest.items() if not score <= _MOST_ROUNDED),
    )


def check_neighbours(model: PreTrainedModel, max_model_len: int) -> None:
    """Raises ConfigError when K of a sequence changes with how long another sequence of the step is."""
    ids = _token_ids(_CACHED_TOKENS + 1, vocab_size(model), offset=0)
    share = StepShare(token_ids=ids[:-1], start=0, block_table=(0,), sample=None)
    keys: list[dict[int, Tensor]] = []
    for start in (0, max_model_len - 1):
        neighbour = StepShare(
            token_ids=ids[-1:], start=start, block_table=(1,) * (start // BLOCK_SIZE + 1), sample=None
        )
        keys.append(_record(model, [share, neighbour]).first_keys)
    beside_short, beside_long = keys
    for layer, alike in beside_short.items():
        error = (beside_long[layer].double() - alike.double()).norm() / alike.double().norm()
        if not error <= _KEY_TOLERANCE[model.dtype]:
            raise _refusal(
                model,
                f"K of layer {layer} changes by {float(error):.1%} beside a sequence of {max_model_len:,} tokens, as "
                "positions whose frequencies follow the longest sequence do (a lower maximum model length may help)",
            )


def _record(model: PreTrainedModel, shares: Sequence[StepShare]) -> _Recorder:
    recorder = _Recorder()
    step = StepLayout.pack(shares, BLOCK_SIZE, model.device)
    try:
        with torch.inference_mode(), attending(recorder, step):
            model(input_ids=step.token_ids[None], position_ids=step.positions[None], use_cache=False)
    except _FAILURES as error:
        raise _refusal(model, f"{type(error).__name__}: {error}") from error
    return recorder


def expect(model: PreTrainedModel) -> Expectation:
    """Computes what `verify` compares with, by the model's own eager attention; leaves it with ours."""
    first = _token_ids(_FIRST_TOKENS, vocab_size(model), offset=0)
    second = _token_ids(_SECOND_TOKENS, vocab_size(model), offset=1)
    ids = [torch.tensor([tokens], device=model.device) for tokens in (first, second)]
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = [model(input_ids=sequence, use_cache=False).logits[0] for sequence in ids]
    except _FAILURES as error:
        raise _refusal(model, f"its own forward fails: {type(error).__name__}: {error}") from error
    register()
    model.set_attn_implementation(IMPLEMENTATION)
    return Expectation(first=first, second=second, logits=(logits[0][-_COMPARED:], logits[1][-_COMPARED:]))


def verify(model: PreTrainedModel, expected: Expectation, logits_of: Callable[[Sequence[StepShare]], Tensor]) -> None:
    """Runs two sequences beside each other: a chunk of the first one after cached KV, a fresh one, then decode.

    `logits_of` runs a step over an empty cache of two blocks of BLOCK_SIZE. Raises ConfigError unless the logits are
    those of the model's own attention, on average over the rows of a sequence: in bfloat16 a single row may differ
    much, where a router of experts sits on the fence.
    """
    first, second = expected.first, expected.second
    try:
        logits_of([_share(first, 0, _CACHED_TOKENS, block=1, compared=False)])
        rows = []
        for step in range(_COMPARED):
            first_end, second_end = _FIRST_TOKENS - _COMPARED + 1 + step, _SECOND_TOKENS - _COMPARED + 1 + step
            shares = [
                _share(first, first_end - 1 if step else _CACHED_TOKENS, first_end, block=1),
                _share(second, second_end - 1 if step else 0, second_end, block=0),
            ]
            rows.append(logits_of(shares))
    except _FAILURES as error:
        raise _refusal(model, f"{type(error).__name__}: {error}") from error
    logits = torch.stack(rows, dim=1)  # [2, _COMPARED, vocab_size]
    error_share = max(relative_error(*pair) for pair in zip(logits, expected.logits, strict=True))
    if not error_share <= _TOLERANCE[model.dtype]:
        raise _refusal(model, f"over cached KV its logits are off by {error_share:.1%}")


def relative_error(logits: Tensor, reference: Tensor) -> float:
    """Mean over rows of |logits - reference| / |reference|, both without their own mean, which softmax ignores."""
    ours, theirs = (rows.double() - rows.double().mean(dim=-1, keepdim=True) for rows in (logits, reference))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).mean())


def _share(ids: Sequence[int], start: int, end: int, *, block: int, compared: bool = True) -> StepShare:
    spec = SampleSpec(
        sampling=Sampling(seed=0), choice=0, index=0, prompt_ids=ids, output_ids=(), stop_token_ids=frozenset()
    )
    return StepShare(token_ids=ids[start:end], start=start, block_table=(block,), sample=spec if compared else None)


def _token_ids(count: int, below: int, offset: int) -> list[int]:
    """Ids spread over the vocabulary, the same at every load (Knuth's multiplicative hashing)."""
    return [(2 * place + offset + 1) * 2_654_435_761 % below for place in range(count)]


def _refusal(model: PreTrainedModel, finding: str) -> ConfigError:
    return ConfigError(
        f"models of type {model.config.model_type} ({type(model).__name__}) cannot be served: {finding}; "
        "choose a decoder-only model whose layers all use plain causal attention"
    )
