"""A request on its way through the simulated fleet."""

from __future__ import annotations

from prefixcache.simulation.trace import TraceRequest


class Job:
    """One generation; a worker that dies leaves it to be placed once more, with what it has generated as prompt."""

    __slots__ = (
        "arrived_at",
        "computed_tokens",
        "number",
        "output_tokens",
        "placed_hit_tokens",
        "placed_prefill_s",
        "prompt_tokens",
        "proxy",
        "request",
        "ttft_s",
    )

    def __init__(self, request: TraceRequest, *, number: int, arrived_at: float, proxy: int) -> None:
        self.request = request
        self.number = number
        """Of its arrival."""
        self.arrived_at = arrived_at
        self.proxy = proxy
        """Number of the proxy that owns it."""
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        """Still to be generated."""
        self.placed_prefill_s = 0.0
        """What its proxy took its prefill for when it placed it."""
        self.placed_hit_tokens = 0
        self.computed_tokens = 0
        """On the worker it is on, by slices before the last one."""
        self.ttft_s: float | None = None

    @property
    def kv_tokens(self) -> int:
        """What it comes to fill of a cache."""
        return self.prompt_tokens + self.output_tokens

    def continue_elsewhere(self, generated_tokens: int) -> None:
        """Its worker has died after so many tokens of this try."""
        self.prompt_tokens += generated_tokens
        self.output_tokens -= generated_tokens
        self.computed_tokens = 0
