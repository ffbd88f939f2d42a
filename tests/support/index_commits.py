"""Commits for tests: request, chain and incarnation, and what is usual for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prefixcache.index.base import REQUEST_ID_BYTES, Commit
from prefixcache.index.boundaries import Boundaries
from prefixcache.load import ProxyLoad

PROXY_ONE, PROXY_TWO = "00000000000000a1", "00000000000000a2"


def commit_of(
    verb: Literal["place", "settle", "release"],
    request: int,
    chain: Sequence[int],
    incarnation: int,
    *,
    proxy_id: str = PROXY_ONE,
    load: ProxyLoad | None = None,
) -> Commit:
    """`request` is a number in place of an id."""
    return Commit(
        verb=verb,
        request_id=request.to_bytes(REQUEST_ID_BYTES, "big"),
        boundaries=Boundaries.of(chain),
        incarnation=incarnation,
        proxy_id=proxy_id,
        load=load or ProxyLoad(version=0),
    )
