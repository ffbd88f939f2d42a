"""The worker beside plain transformers, its memory, and beside vLLM where that is installed: `make bench-worker`."""

from __future__ import annotations

import argparse
from pathlib import Path

from worker import torch_environment


def main() -> None:
    torch_environment.settle()
    from tests.bench.worker.bench import PARTS, run

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a smoke: a tiny model, floors shown and not judged")
    options.add_argument("--model", type=Path, metavar="DIR", help="its folder  [default: the demo model]")
    options.add_argument("--only", choices=PARTS, action="append", help="this part; repeatable")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    run(quick=chosen.quick, model=chosen.model, only=chosen.only or PARTS, seed=chosen.seed)


if __name__ == "__main__":
    main()
