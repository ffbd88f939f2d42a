"""Requests for tests of the worker: as a proxy sends them, and as an engine passes them on to its runner."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.protocol import Generate, Sampling
from prefixcache.types import pack_tokens
from worker.runner import SampleSpec

GREEDY = Sampling(seed=0, temperature=0)


def generate(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    output: Sequence[int] = (),
    root: int = 1,
    sampling: Sampling = GREEDY,
    stop_token_ids: Sequence[int] = (),
    choice: int = 0,
    waited_s: float = 0.0,
    predicted_hit_tokens: int | None = None,
    predicted_for: int = 0,
) -> Generate:
    """A request as a proxy would send it."""
    return Generate(
        id=request_id,
        root=root,
        prompt_ids=pack_tokens(prompt),
        output_ids=pack_tokens(output),
        sampling=sampling,
        stop_token_ids=tuple(stop_token_ids),
        choice=choice,
        max_tokens=max_tokens,
        waited_s=waited_s,
        predicted_hit_tokens=predicted_hit_tokens,
        predicted_for=predicted_for,
    )


def sample_spec(
    sampling: Sampling = GREEDY,
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    choice: int = 0,
    index: int | None = None,
    stop_token_ids: Sequence[int] = (),
) -> SampleSpec:
    """What an engine would tell a runner; `index` may differ from the length of `output` where only draws matter."""
    return SampleSpec(
        sampling=sampling,
        choice=choice,
        index=len(output) if index is None else index,
        prompt_ids=prompt,
        output_ids=output,
        stop_token_ids=frozenset(stop_token_ids),
    )
