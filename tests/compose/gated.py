"""A stack whose workers begin to load when the test says so."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.compose import ROOT, ComposeStack, removed_afterwards, stack_of

SIMULATED = ROOT / "tests" / "compose" / "simulated.yml"


UP_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStack:
    """Workers load nothing until the gate is opened; from then on none of them waits, new ones neither."""

    stack: ComposeStack
    gate: Path
    up: subprocess.Popen[str]
    """`up --wait`, which runs since `began_at`, by time.monotonic()."""
    began_at: float

    def open(self) -> None:
        (self.gate / "open").touch()

    def finish(self) -> None:
        """Opens the gate, and returns when all is up."""
        self.open()
        self.up.wait(UP_TIMEOUT_S)
        assert self.up.returncode == 0


@contextmanager
def gated_stack(gate: Path) -> Iterator[GatedStack]:
    """Redis, two simulated workers, a proxy, the edge, on their way up; removed afterwards. `gate`: an empty folder."""
    gate.chmod(0o755)
    stack = stack_of(
        "sim",
        files=[SIMULATED],
        environment={"GATE": str(gate)},
        scale={"redis": 1, "worker": 2, "proxy": 1, "edge": 1},
    )
    with removed_afterwards(stack):
        up = stack.begin(*stack.up_arguments())
        try:
            yield GatedStack(stack=stack, gate=gate, up=up, began_at=time.monotonic())
        finally:
            if up.poll() is None:
                up.terminate()
            said, _ = up.communicate()
            print(said)
