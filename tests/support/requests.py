"""Protocol v1 requests for tests of the worker."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.protocol import Generate, Sampling
from prefixcache.types import pack_tokens

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
) -> Generate:
    """A request as a proxy would send it."""
    return Generate(
        id=request_id,
        root=root,
        prompt_ids=pack_tokens(prompt),
        output_ids=pack_tokens(output),
        sampling=sampling,
        stop_token_ids=tuple(stop_token_ids),
        max_tokens=max_tokens,
    )
