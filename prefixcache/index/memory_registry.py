"""The registry of workers in the memory of one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prefixcache.index.memory_index import MemoryIndex
from prefixcache.registry import Registry, WorkerRecord


class MemoryRegistry(Registry):
    """Records by worker id; a record is live while its incarnation is, in the index of its namespace."""

    def __init__(self, indexes: Mapping[str, MemoryIndex]) -> None:
        self._indexes = indexes
        self.records: dict[str, WorkerRecord] = {}
        self._namespaces: set[str] = set()

    async def announce(self, record: WorkerRecord, *, replace: bool = True) -> None:
        self._namespaces.add(record.namespace)
        if replace or record.worker_id not in self.records:
            self.records[record.worker_id] = record

    async def withdraw(self, record: WorkerRecord) -> None:
        if self.records.get(record.worker_id) == record:
            del self.records[record.worker_id]

    async def namespaces(self) -> Collection[str]:
        return set(self._namespaces)

    async def forget_namespace(self, namespace: str) -> None:
        self._namespaces.discard(namespace)

    async def workers(self) -> Mapping[WorkerRecord, bool]:
        return {record: self._is_live(record) for record in self.records.values()}

    def _is_live(self, record: WorkerRecord) -> bool:
        index = self._indexes.get(record.namespace)
        return index is not None and index.is_live(record.incarnation)
