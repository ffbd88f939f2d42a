"""What attention costs beside the rest of a model, by its shape."""

from __future__ import annotations

from transformers import PreTrainedModel

from worker.kv_cache import KVShape

SLOWER = 3.0
"""Of a multiplication in attention, against one in a linear layer. Measured: SmolLM2-135M in bfloat16 on one core."""


def pair_rows(model: PreTrainedModel, shape: KVShape) -> float:
    """What it takes to attend to one key, by what a row takes elsewhere: one multiplication a weight.

    Embeddings and head do not count, for few rows pass the head. Experts count as if each row passed all of them.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    outside = {id(model.get_input_embeddings()), id(head)}
    num_weights = sum(
        parameter.numel()
        for module in model.modules()
        if id(module) not in outside
        for parameter in module.parameters(recurse=False)
        if parameter.dim() > 1
    )
    num_heads: int = model.config.get_text_config().num_attention_heads
    num_pair = sum(num_heads * (layer.key_dim + layer.value_dim) for layer in shape.layers.values())
    return SLOWER * num_pair / max(num_weights, 1)
