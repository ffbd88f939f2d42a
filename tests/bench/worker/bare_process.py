"""A process with what the worker program imports and a model's weights, nothing else: prints its resident bytes.

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

PROGRAM = (worker.__main__, worker.model_runner)


def main() -> None:
    folder, dtype = sys.argv[1:]
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    for weights in model.parameters():
        weights.detach().sum()  # pages of a mapped file are resident once they were read
    print(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
