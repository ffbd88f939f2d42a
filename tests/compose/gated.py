"""A stack whose workers begin to load when the test says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.compose import ROOT, ComposeStack, stack_of

SIMULATED = ROOT / "tests" / "compose" / "simulated.yml"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStack:
    """Workers load nothing until the gate is opened; from then on none of them waits, new ones neither."""

    stack: ComposeStack
    gate: Path

    @classmethod
    def of(cls, gate: Path) -> GatedStack:
        """Simulated workers; nothing runs yet. `gate` is an empty folder."""
        gate.chmod(0o755)
        stack = stack_of(
            "sim",
            files=[SIMULATED],
            environment={"GATE": str(gate)},
            scale={"redis": 1, "worker": 2, "proxy": 1, "edge": 1},
        )
        return cls(stack=stack, gate=gate)

    def open(self) -> None:
        (self.gate / "open").touch()
