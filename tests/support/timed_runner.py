"""A scripted runner on a clock of its own: 1,000 tokens a second, and no time passes but for what it computes."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.manual_clock import ManualClock
from tests.support.scripted_runner import ScriptedRunner
from worker.runner import Drawn, StepShare


class TimedRunner(ScriptedRunner):
    """Each token takes a thousandth of a second on `clock`; a step waits while the runner is paused."""

    def __init__(self, *, num_blocks: int = 256) -> None:
        super().__init__(num_blocks=num_blocks)
        self.clock = ManualClock(1_000.0)

    def execute(self, shares: Sequence[StepShare]) -> list[Drawn | Exception | None]:
        results = super().execute(shares)
        self.clock.now += sum(len(share.token_ids) for share in shares) / 1_000
        return results
