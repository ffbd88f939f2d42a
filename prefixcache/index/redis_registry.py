"""The registry of workers in Redis."""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import msgspec

from prefixcache.index import scripts
from prefixcache.index.keys import INCARNATION_BITS, NamespaceKeys, namespaces_key, registry_key
from prefixcache.index.redis_client import RedisClient
from prefixcache.limits import INDEX_WRITE_TIMEOUT_S
from prefixcache.registry import Registry, WorkerRecord

logger = logging.getLogger(__name__)

_COMPLAINT_INTERVAL_S = 60.0
_NAMESPACE = re.compile(r"[0-9a-f]{16}")


class RedisRegistry(Registry):
    """One HASH, worker id -> JSON record, read whole; leases are those of the index."""

    def __init__(self, client: RedisClient, key_prefix: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._key_prefix = key_prefix
        self._key = registry_key(key_prefix)
        self._namespaces_key = namespaces_key(key_prefix)
        self._clock = clock
        self._complained_at: float | None = None
        self._contents: dict[str, tuple[WorkerRecord, bytes]] = {}
        """What was read last: a record that another version wrote is withdrawn with the fields unknown here."""

    async def announce(self, record: WorkerRecord, *, replace: bool = True) -> None:
        await self._write(self._namespaces_key, "SADD", record.namespace)
        await self._write(self._key, "HSET" if replace else "HSETNX", record.worker_id, msgspec.json.encode(record))

    async def withdraw(self, record: WorkerRecord) -> None:
        read, content = self._contents.get(record.worker_id, (None, b""))
        if read != record:
            content = msgspec.json.encode(record)
        await self._client.run(scripts.WITHDRAW, self._key, record.worker_id, content, deadline_s=INDEX_WRITE_TIMEOUT_S)

    async def namespaces(self) -> Collection[str]:
        names = await self._client.command("SMEMBERS", self._namespaces_key, deadline_s=INDEX_WRITE_TIMEOUT_S)
        return {name for name in (member.decode("latin-1") for member in names) if _NAMESPACE.fullmatch(name)}

    async def forget_namespace(self, namespace: str) -> None:
        await self._client.command("SREM", self._namespaces_key, namespace, deadline_s=INDEX_WRITE_TIMEOUT_S)

    async def workers(self) -> Mapping[WorkerRecord, bool]:
        contents = await self._client.command("HGETALL", self._key, deadline_s=INDEX_WRITE_TIMEOUT_S)
        by_namespace: dict[str, list[WorkerRecord]] = defaultdict(list)
        malformed: list[str] = []
        self._contents = {}
        for worker_id, content in contents.items():
            try:
                record = _decode(worker_id, content)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
                malformed.append(f"{worker_id!r} ({error})")
            else:
                by_namespace[record.namespace].append(record)
                self._contents[record.worker_id] = (record, content)
        if malformed:
            self._complain(malformed)
        return await self._leases_of(by_namespace)

    async def _leases_of(self, by_namespace: dict[str, list[WorkerRecord]]) -> dict[WorkerRecord, bool]:
        if not by_namespace:
            return {}
        commands: list[list[str | int]] = [["TIME"]]
        for namespace, records in by_namespace.items():
            live = NamespaceKeys(key_prefix=self._key_prefix, namespace=namespace).live
            commands.append(["ZMSCORE", live, *(record.incarnation for record in records)])
        (seconds, microseconds), *leases = await self._client.commands(commands, deadline_s=INDEX_WRITE_TIMEOUT_S)
        now_ms = seconds * 1_000 + microseconds // 1_000
        return {
            record: expiry is not None and expiry > now_ms
            for records, expiries in zip(by_namespace.values(), leases, strict=True)
            for record, expiry in zip(records, expiries, strict=True)
        }

    async def _write(self, key: str, command: str, *arguments: str | bytes) -> None:
        await self._client.run(scripts.WRITE, key, command, *arguments, deadline_s=INDEX_WRITE_TIMEOUT_S)

    def _complain(self, malformed: list[str]) -> None:
        now = self._clock()
        if self._complained_at is None or now - self._complained_at >= _COMPLAINT_INTERVAL_S:
            self._complained_at = now
            logger.warning("%d malformed worker records ignored, the first is %s", len(malformed), malformed[0])


def _decode(worker_id: bytes, content: bytes) -> WorkerRecord:
    """Raises ValueError (msgspec's errors are some) for a record that no proxy could use."""
    record = msgspec.json.decode(content, type=WorkerRecord)
    if record.worker_id != worker_id.decode():
        raise ValueError(f"the record names itself {record.worker_id!r}")
    if not _NAMESPACE.fullmatch(record.namespace):
        raise ValueError(f"namespace {record.namespace!r} is not 16 hex digits")
    if (
        record.block_size <= 0
        or record.stride <= 0
        or not record.served_names
        or not 0 < record.incarnation < 2**INCARNATION_BITS
        or not 0 < record.max_model_len < 2**31
    ):
        raise ValueError("block size, stride, incarnation, model length or served names are out of range")
    if not all(name.isprintable() for name in (record.model, record.revision, *record.served_names)):
        raise ValueError("the model's names are not printable")
    return record
