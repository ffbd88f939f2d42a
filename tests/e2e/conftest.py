"""The demo model in float32 (so that texts are comparable to the letter) and one stack for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache.demo.model import ensure_demo_model
from tests.support.stack import RunningStack, running_stack
from tests.support.valkey import valkey, valkey_process

__all__ = ["valkey", "valkey_process"]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model in float32."""
    return ensure_demo_model("float32")


@pytest.fixture(scope="session")
def stack(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two workers and a proxy, started by `prefixcache up`."""
    with running_stack(
        tmp_path_factory.mktemp("stack"),
        ["--model", str(demo_model), "--workers", "2"],
        environment={"PREFIXCACHE_DTYPE": "float32"},
    ) as running:
        yield running
