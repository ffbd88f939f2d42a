"""One build for all; two stacks, one with simulated workers, one with the demo model. What was found comes last."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.compose.findings import Findings
from tests.compose.gated import GatedStack, gated_stack
from tests.support.compose import ComposeStack, build_images, removed_afterwards, stack_of, why_not

_FINDINGS = pytest.StashKey[Findings]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FINDINGS] = Findings()


def pytest_terminal_summary(config: pytest.Config) -> None:
    config.stash[_FINDINGS].show()


@pytest.fixture(scope="session")
def findings(pytestconfig: pytest.Config) -> Findings:
    return pytestconfig.stash[_FINDINGS]


@pytest.fixture(scope="session")
def images() -> None:
    """They are built, or there is no engine. COMPOSE_NO_BUILD=1 takes those that are there."""
    if reason := why_not():
        pytest.skip(reason)
    if not os.environ.get("COMPOSE_NO_BUILD"):
        build_images()


@pytest.fixture(scope="session")
def simulated(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedStack]:
    with gated_stack(tmp_path_factory.mktemp("gate")) as stack:
        yield stack


@pytest.fixture(scope="module")
def real(simulated: GatedStack) -> Iterator[ComposeStack]:
    """The stack as the file says it; not started yet. The workers of the other one load meanwhile."""
    with removed_afterwards(stack_of("real", scale={"redis": 1, "worker": 2, "proxy": 1, "edge": 1})) as stack:
        yield stack
