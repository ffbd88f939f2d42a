"""What SGLang tells under /server_info (older ones: /get_server_info) of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

_MOST_TOKENS = 1 << 40
_MOST_RANKS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """None for what is not told."""

    block_size: int | None = None
    """SGLang's page_size: 1 unless it was set."""
    capacity_tokens: int | None = None
    """Of all data-parallel ranks together."""
    caches_prefixes: bool | None = None


def read_server_info(body: bytes) -> ServerInfo | None:
    """None unless it is SGLang's answer, which names the size of its KV cache."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    states = answer.get("internal_states")
    ranks = [rank for rank in states if isinstance(rank, dict)] if isinstance(states, list) else []
    tokens = _count(answer.get("max_total_num_tokens"), _MOST_TOKENS)
    if tokens is None:
        of_ranks = [_count(rank.get("max_total_num_tokens"), _MOST_TOKENS) for rank in ranks]
        tokens = max((count for count in of_ranks if count is not None), default=None)
    if tokens is None:
        return None
    is_off = answer.get("disable_radix_cache")
    return ServerInfo(
        block_size=_count(answer.get("page_size"), _MOST_TOKENS) or 1,
        capacity_tokens=tokens * (_count(answer.get("dp_size"), _MOST_RANKS) or 1),
        caches_prefixes=not is_off if isinstance(is_off, bool) else None,
    )


def _count(value: object, most: int) -> int | None:
    """A positive whole number, also one written as 1.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most or value != int(value):
        return None
    return int(value)
