"""A process with what the worker program imports and a model's weights, nothing else.

Prints its resident bytes, and those of the weights that the worker packs, which it may have twice.

python -m tests.bench.worker.bare_process FOLDER DTYPE
"""

from __future__ import annotations

import sys

import psutil
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import worker.__main__
import worker.model_runner
from worker.model_loader import pack
from worker.packed_linear import PackedLinear

PROGRAM = (worker.__main__, worker.model_runner)


def main() -> None:
    folder, dtype = sys.argv[1:]
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    for weights in model.parameters():
        weights.detach().sum()  # pages of a mapped file are resident once they were read
    resident_bytes = psutil.Process().memory_info().rss
    pack(model)
    packed_bytes = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, PackedLinear))
    print(resident_bytes, packed_bytes)


if __name__ == "__main__":
    main()
