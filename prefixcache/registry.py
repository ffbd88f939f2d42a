"""The registry: what each worker says of itself, read by every proxy on a timer.

A worker writes one record and renews the lease of its incarnation; a record whose incarnation has no live lease is
not served. The store behind it is the same Redis as the index; see `index/keys.py` for the keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Protocol

import msgspec

from prefixcache.types import CacheGeometry

WORKER_ID_PATTERN = r"^[!-~]{1,128}$"
"""Printable ASCII without blanks: an id goes into headers and labels, and Redis is not to be trusted with those."""
ADDRESS_PATTERN = r"^[!-~]{1,255}:[0-9]{1,5}$"
"""Likewise: an address goes into logs."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. Unknown fields are ignored, so that versions can be mixed during an upgrade."""

    worker_id: Annotated[str, msgspec.Meta(pattern=WORKER_ID_PATTERN)]
    address: Annotated[str, msgspec.Meta(pattern=ADDRESS_PATTERN)]
    """HOST:PORT that serves protocol v1 and the worker's HTTP on one port."""
    namespace: str
    incarnation: int
    protocol: tuple[int, int]
    """Major and minor version."""
    model: str
    revision: str
    served_names: tuple[str, ...]
    """Names under which clients ask for the model, the main one first."""
    tokenizer_fingerprint: str
    """sha-256 over names and bytes of the files under GET /tokenizer/."""
    vocab_size: int
    max_model_len: int
    """Most tokens of prompt plus answer; never more than the worker's KV pool holds."""
    stop_token_ids: tuple[int, ...]
    """Ids that end an answer (the model's eos ids)."""
    block_size: int
    stride: int
    num_blocks: int
    kv_bytes_per_token: int
    started_at: float
    """Seconds since the epoch, on the worker's clock; for people."""

    @property
    def geometry(self) -> CacheGeometry:
        return CacheGeometry(block_size=self.block_size, stride=self.stride)


class Registry(Protocol):
    """Raises IndexUnavailable when the store does not answer in time."""

    async def announce(self, record: WorkerRecord, *, replace: bool = True) -> None:
        """Writes the record; one of the same worker id that stands there gives way only if `replace`."""

    async def withdraw(self, record: WorkerRecord) -> None:
        """Removes the record, unless another one of the same worker id stands there by now."""

    async def workers(self) -> Mapping[WorkerRecord, bool]:
        """Every well-formed record, and whether its incarnation holds a live lease in its namespace."""

    async def namespaces(self) -> Collection[str]:
        """Every namespace that a record named since it was last forgotten: what they left may still be there."""

    async def forget_namespace(self, namespace: str) -> None:
        """It holds nothing any more; a record that names it brings it back."""

    async def live_workers(self) -> Sequence[WorkerRecord]:
        """Those of the records whose incarnation holds a live lease."""
        return [record for record, is_live in (await self.workers()).items() if is_live]
