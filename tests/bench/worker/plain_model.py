"""Plain transformers on the same weights: SDPA attention, a DynamicCache, nothing kept from request to request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tests.bench.worker.clock import Cost, Moment, cost_of


class PlainModel:
    """What its own users would run, less the overhead of `generate`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )

    @torch.inference_mode()
    def first_token(self, prompt: Sequence[int]) -> Cost:
        """One forward of the whole prompt, which fills a cache, and the likeliest token after it."""
        return cost_of(lambda: self.forward(torch.tensor([prompt]), DynamicCache()))

    @torch.inference_mode()
    def prefilled(self, prompts: Sequence[Sequence[int]]) -> PlainBatch:
        """A batch padded on the left to its longest prompt."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = (torch.arange(longest) >= longest - lengths.unsqueeze(1)).long()
        cache = DynamicCache()
        tokens = self.forward(ids, cache, mask, (mask.cumsum(-1) - 1).clamp(min=0))
        return PlainBatch(self, tokens, cache, mask)

    def forward(
        self, ids: Tensor, cache: DynamicCache, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """[batch, 1] the likeliest token after each row of `ids` [batch, num_tokens]."""
        model: Any = self._model  # its annotation knows no call
        output = model(
            input_ids=ids,
            attention_mask=None if mask is None or bool(mask.all()) else mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens: Tensor = output.logits[:, -1:].argmax(-1)
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Some steps of a batch."""

    costs: list[Cost]
    tokens: list[list[int]]
    """Of each row, with the one that its prefill drew."""


class PlainBatch:
    """Prompts whose K and V stand in one cache."""

    def __init__(self, model: PlainModel, tokens: Tensor, cache: DynamicCache, mask: Tensor) -> None:
        self._model = model
        self._tokens = tokens  # [batch, 1] the first of each answer
        self._cache = cache
        self._mask = mask  # [batch, num_tokens] 0 where a row is padded

    @torch.inference_mode()
    def decode(self, num_steps: int) -> Decoded:
        """Always the same steps: what they add to the cache is taken back."""
        costs: list[Cost] = []
        mask, drawn = self._mask, [self._tokens]
        for _ in range(num_steps):
            began = Moment.now()
            positions = mask.sum(-1, keepdim=True)
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=-1)
            drawn.append(self._model.forward(drawn[-1], self._cache, mask, positions))
            drawn[-1].tolist()  # as whoever looks for the end of an answer
            costs.append(Moment.now() - began)
        self._cache.crop(-num_steps)
        return Decoded(costs=costs, tokens=torch.cat(drawn, dim=-1).tolist())
