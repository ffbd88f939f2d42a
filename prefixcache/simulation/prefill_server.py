"""Engine of PrefillCosts: a server of prefills, and answers that end by themselves."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from prefixcache.simulation.costs import PrefillCosts
from prefixcache.simulation.engine import NEVER, Progress
from prefixcache.simulation.job import Job


class PrefillServer:
    keeps_decodes = False

    def __init__(self, costs: PrefillCosts) -> None:
        self._costs = costs
        self._job: Job | None = None
        self._began_at = 0.0
        self._answers: list[tuple[float, int, Job]] = []
        """Heap of (end, number, job)."""
        self._num_answers = 0
        self.prefill_ends_at = NEVER
        self.next_at = NEVER
        self.busy_s = 0.0

    def prefill(self, job: Job, tokens: int, now: float) -> None:
        self._job, self._began_at = job, now
        self.prefill_ends_at = now + tokens / self._costs.prefill_rate + self._costs.overhead_s
        self._look_ahead()

    def decode(self, job: Job, now: float) -> None:
        self._num_answers += 1
        ends_at = now + job.output_tokens * self._costs.inter_token_s
        heapq.heappush(self._answers, (ends_at, self._num_answers, job))
        self._look_ahead()

    def advance(self, now: float) -> Progress:
        decoded: list[Job] = []
        while self._answers and self._answers[0][0] <= now:
            decoded.append(heapq.heappop(self._answers)[2])
        prefilled, took_s = None, 0.0
        if self.prefill_ends_at <= now:
            prefilled, self._job, self.prefill_ends_at = self._job, None, NEVER
            took_s = now - self._began_at
            self.busy_s += took_s
        self._look_ahead()
        return Progress(decoded=decoded, prefilled=prefilled, prefill_s=took_s)

    def generated_tokens(self, job: Job, now: float) -> int:
        [ends_at] = [ends_at for ends_at, _, other in self._answers if other is job]
        left_s = max(ends_at - now, 0.0)
        left = round(left_s / self._costs.inter_token_s) if self._costs.inter_token_s else 0
        return max(job.output_tokens - left, 0)

    def decoding(self) -> Sequence[Job]:
        return [job for _, _, job in self._answers]

    def _look_ahead(self) -> None:
        answer_at = self._answers[0][0] if self._answers else NEVER
        self.next_at = min(answer_at, self.prefill_ends_at)
