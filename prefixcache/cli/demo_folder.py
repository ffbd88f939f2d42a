"""The folder of the demo model, with a progress bar while it is being made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from prefixcache.cpu import auto_dtype

DEMO = "demo"
"""What stands for the demo model where a folder is asked for."""


def demo_folder() -> Path:
    """Downloads and converts it first if need be. Raises ConfigError."""
    from prefixcache.demo.model import MODEL_NAME, ensure_demo_model  # numpy and tokenizers, needed here alone

    with _progress_bar(f"converting {MODEL_NAME}") as progress:
        return ensure_demo_model(auto_dtype(), progress=progress)


@contextmanager
def _progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears with the first step, so that nothing is printed where nothing is to be done."""
    with ExitStack() as resources:
        bars: list[Any] = []

        def step(_done: int, total: int) -> None:
            if not bars:
                bars.append(resources.enter_context(click.progressbar(length=total, label=label, file=sys.stderr)))
            bars[0].update(1)

        yield step
