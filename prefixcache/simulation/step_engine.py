"""Engine of StepCosts: steps in closed form, as many at once as are alike.

    step   |  1  |  2  |  3  | .. |  k  |      a segment: the same decodes, and chunks of one prefill or none
                                        └ the prefill's piece or the first decode ends here

Within a segment each step costs the same but for the context, which grows by one token a decode and step: n steps take
n * a + b * n * (n - 1) / 2. A prefill that begins during decodes cuts the segment at the end of its present step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from prefixcache.simulation.costs import StepCosts
from prefixcache.simulation.engine import NEVER, Progress
from prefixcache.simulation.job import Job


class StepEngine:
    keeps_decodes = True

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._step = 0
        """Steps that have ended."""
        self._job: Job | None = None
        self._prefill_tokens = 0
        """Of its piece, to be computed from the present segment on."""
        self._prefill_began_at = 0.0
        self._decodes: list[tuple[int, int, Job, int]] = []
        """Heap of (last step, number, job, tokens in its context in step 0)."""
        self._num_decodes = 0
        self._base_context = 0
        """Of all decodes, were it step 0."""
        self._began_at = 0.0
        self._num_steps = 0
        """Of the segment; 0 is none."""
        self._chunk_tokens = 0
        """Of each of its steps but the last, which has what is left."""
        self.next_at = NEVER
        self.prefill_ends_at = NEVER
        self.busy_s = 0.0

    def prefill(self, job: Job, tokens: int, now: float) -> None:
        self._job, self._prefill_tokens, self._prefill_began_at = job, tokens, now
        if self._num_steps:
            self._num_steps = self._steps_until(now)
            self.next_at = self._began_at + self._segment_s(self._num_steps)
            self.prefill_ends_at = self.next_at + tokens / self._costs.prefill_rate
        else:
            self._begin_segment(now)

    def decode(self, job: Job, now: float) -> None:
        """The first token was drawn in the prefill's last step."""
        self._num_decodes += 1
        last_step = self._step + max(job.output_tokens - 1, 0)
        context = job.prompt_tokens + 1 - self._step
        heapq.heappush(self._decodes, (last_step, self._num_decodes, job, context))
        self._base_context += context
        self._begin_segment(now)

    def advance(self, now: float) -> Progress:
        self._step += self._num_steps
        prefilled, took_s = None, 0.0
        if self._chunk_tokens:
            self._prefill_tokens -= min(self._num_steps * self._chunk_tokens, self._prefill_tokens)
            if not self._prefill_tokens:
                prefilled, self._job, self.prefill_ends_at = self._job, None, NEVER
                took_s = now - self._prefill_began_at
                self.busy_s += took_s
        self._num_steps = self._chunk_tokens = 0
        decoded: list[Job] = []
        while self._decodes and self._decodes[0][0] <= self._step:
            _, _, job, context = heapq.heappop(self._decodes)
            self._base_context -= context
            decoded.append(job)
        self._begin_segment(now)
        return Progress(decoded=decoded, prefilled=prefilled, prefill_s=took_s)

    def generated_tokens(self, job: Job, now: float) -> int:
        [last_step] = [last_step for last_step, _, other, _ in self._decodes if other is job]
        return max(job.output_tokens - (last_step - self._step), 0)

    def decoding(self) -> Sequence[Job]:
        return [job for _, _, job, _ in self._decodes]

    def _begin_segment(self, now: float) -> None:
        """From a step's end on: whatever there is to do now."""
        decodes = len(self._decodes)
        # A decode whose last token is drawn already ends at once.
        to_first_end = self._decodes[0][0] - self._step if decodes else 0
        self._chunk_tokens = max(self._costs.step_tokens - decodes, 1) if self._prefill_tokens else 0
        if self._chunk_tokens:
            chunks = -(-self._prefill_tokens // self._chunk_tokens)
            self._num_steps = min(chunks, to_first_end) if decodes else chunks
        else:
            self._num_steps = to_first_end
        self._began_at = now
        if not decodes and not self._chunk_tokens:
            self.next_at = NEVER
            return
        self.next_at = now + self._segment_s(self._num_steps)
        if self._prefill_tokens:
            left = max(self._prefill_tokens - self._num_steps * self._chunk_tokens, 0)
            self.prefill_ends_at = self.next_at + left / self._costs.prefill_rate

    def _segment_s(self, num_steps: int) -> float:
        """Seconds of the first so many steps of the segment."""
        if not num_steps:
            return 0.0
        costs, decodes = self._costs, len(self._decodes)
        context = self._base_context + decodes * self._step
        first_s = costs.cost_s(self._chunk_tokens, decodes, context)
        excess = max(num_steps * self._chunk_tokens - self._prefill_tokens, 0)
        growing_ms = costs.itl_per_1k_context_ms * decodes / 1e3 * num_steps * (num_steps - 1) / 2
        return num_steps * first_s + (growing_ms - costs.prefill_us * excess / 1e3) / 1e3 / costs.speed

    def _steps_until(self, now: float) -> int:
        """Steps of the segment that have ended when the one which runs at `now` has."""
        costs, decodes = self._costs, len(self._decodes)
        elapsed_s = now - self._began_at
        first_s = costs.cost_s(0, decodes, self._base_context + decodes * self._step)
        growth_s = costs.itl_per_1k_context_ms * decodes / 1e6 / costs.speed
        if first_s + growth_s <= 0:
            return self._num_steps
        if growth_s:
            # n * first + growth * n * (n - 1) / 2 = elapsed
            half = first_s - growth_s / 2
            steps = (math.sqrt(half * half + 2 * growth_s * elapsed_s) - half) / growth_s
        else:
            steps = elapsed_s / first_s
        return min(max(math.ceil(steps - 1e-9), 0), self._num_steps)
