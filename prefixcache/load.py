"""Load of the workers, as workers and proxies tell each other through the index.

    worker w ── every LEASE_RENEWAL_S: what it has started ──►  load of its incarnation: one record of the worker,
    proxy  p ── with each commit, else every LOAD_REPORT_S ──►  one record of each proxy process: what p sent to w and
                                                                w has not started, as seconds of prefill

Every quantity has one writer, and a record is absolute: nothing is incremented, so nothing leaks when a process dies. A
record that is not written again expires after LOAD_RECORD_S. `version` grows with each record of a writer, so that one
that comes late never replaces a newer one.

The load of an incarnation is one value: an entry of each writer, one behind the other, whoever wrote last at the end.
Big-endian:

    entry     8 bytes writer | u8 length of the record | record
    record    u8 format | u64 end, ms of Redis time | u64 version | payload

A payload grows at its end: bytes beyond the known ones are ignored, and a writer that does not write the last ones yet
tells nothing of what they say.

The writer is the id of a proxy, or 8 zero bytes: the worker itself. The scripts read and write all but the payload. A
record that has expired, or is of an unknown format, counts for nothing: whoever writes next drops it.
"""

from __future__ import annotations

import bisect
import secrets
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from prefixcache.limits import LOAD_RECORD_S

WAITING_CLASSES_S = (0.25, 1.0, 4.0, 16.0)
"""Upper bounds of the classes of prefill time; the fifth is what takes longer."""
NUM_WAITING_CLASSES = len(WAITING_CLASSES_S) + 1
NO_WAITING = (0.0,) * NUM_WAITING_CLASSES

RECORD_FORMAT = 1
WRITER_BYTES = 8
WORKER_WRITER = bytes(WRITER_BYTES)

_HEAD = struct.Struct(">BQQ")
HEAD_BYTES = _HEAD.size
_WORKER = struct.Struct(">ffffIB")
_WORKER_TAIL = struct.Struct(f">I{NUM_WAITING_CLASSES}f")
"""What a worker's payload has grown by."""
_PROXY = struct.Struct(f">I{1 + NUM_WAITING_CLASSES}f")
_PROXY_TAIL = struct.Struct(">f")
"""What a proxy's has grown by."""
_WORKER_RECORD, _PROXY_RECORD = (struct.Struct(_HEAD.format + part.format[1:]) for part in (_WORKER, _PROXY))
"""Head and payload in one."""
_UNKNOWN_BLOCKS = 2**32 - 1
"""Stands for None in a record."""
_MOST = 1e12
"""Of any number in a record: seconds, tokens, or tokens a second."""
_LEAST_RATE = 0.01
"""A worker that says less has measured nothing; a prefill would take longer than any number here can say."""
_MOST_REMEMBERED = 1_024
"""Values that are read once, however often they come: the last few of 256 incarnations."""


def waiting_class(prefill_s: float) -> int:
    """Number of the class that a prefill of this length belongs to."""
    return bisect.bisect_left(WAITING_CLASSES_S, prefill_s)


def by_class(prefills_s: Iterable[float]) -> tuple[float, ...]:
    """Their sums by WAITING_CLASSES_S."""
    sums = list(NO_WAITING)
    for prefill_s in prefills_s:
        sums[waiting_class(prefill_s)] += prefill_s
    return tuple(sums)


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a worker says of itself."""

    version: int = 0
    """Below 2**53: the scripts compare it as a double."""
    rest_s: float
    """Seconds of prefill until it chooses again what goes next: the rest of the slice that runs now."""
    sliced_s: tuple[float, ...] = NO_WAITING
    """Seconds of prefill that are left after that of what it has started: of sliced ones, by WAITING_CLASSES_S."""
    prefill_rate: float
    """Uncached prompt tokens a second, measured; 0 while nothing was."""
    inter_token_latency_s: float
    """Of its last decode steps; 0 while there were none."""
    available_blocks: int
    """KV blocks free or evictable."""
    free_blocks: int | None = None
    """Those of them that hold nothing yet; None where the worker does not tell."""
    oldest_age_s: float
    """Since the evictable block that goes first was used last; 0 without one."""
    is_draining: bool = False

    def payload(self) -> bytes:
        return _WORKER.pack(
            self.rest_s,
            self.prefill_rate,
            self.inter_token_latency_s,
            self.oldest_age_s,
            self.available_blocks,
            self.is_draining,
        ) + _WORKER_TAIL.pack(_UNKNOWN_BLOCKS if self.free_blocks is None else self.free_blocks, *self.sliced_s)


class ProxyLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one proxy process has sent to one incarnation and not seen the end of."""

    version: int
    running: int = 0
    """Requests started and not ended."""
    prefilling_s: float = 0.0
    """Rest of the prefill of those that have started and have no token yet, up to the end of the running slice."""
    waiting_s: tuple[float, ...] = NO_WAITING
    """Prefill seconds by WAITING_CLASSES_S: of those not started, and of a sliced one after the running slice."""
    recent_tokens: float = 0.0
    """Prompt tokens that it placed there of late; 0 where it does not tell, as for own workers."""

    def payload(self) -> bytes:
        return _PROXY.pack(self.running, self.prefilling_s, *self.waiting_s) + _PROXY_TAIL.pack(self.recent_tokens)


class IncarnationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one incarnation that have not expired; times were counted down by the records' age."""

    worker: WorkerLoad | None = None
    proxies: Mapping[str, ProxyLoad] = {}
    """By process id of the proxy."""


def new_proxy_id() -> str:
    """16 hex digits, random: never those of WORKER_WRITER."""
    return f"{1 + secrets.randbelow(2 ** (8 * WRITER_BYTES) - 1):0{2 * WRITER_BYTES}x}"


def proxy_writer(proxy_id: str) -> bytes:
    """The writer that a proxy is. Raises ValueError for what is no proxy's id."""
    writer = bytes.fromhex(proxy_id)
    if len(writer) != WRITER_BYTES or writer == WORKER_WRITER:
        raise ValueError(f"{proxy_id!r} is not the id of a proxy")
    return writer


def stored_record(payload: bytes, *, end_ms: int, version: int) -> bytes:
    """What the scripts store of one writer."""
    return _HEAD.pack(RECORD_FORMAT, end_ms, version) + payload


def stored_load(records: Mapping[bytes, bytes]) -> bytes:
    """The value that holds these records, named by their writers."""
    return b"".join(writer + bytes((len(record),)) + record for writer, record in records.items())


def records_of(value: bytes) -> dict[bytes, bytes]:
    """By writer; where the value is cut short, what stands before."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at + WRITER_BYTES < len(value):
        begin = at + WRITER_BYTES + 1
        end = begin + value[begin - 1]
        if end <= len(value):
            records[value[at : at + WRITER_BYTES]] = value[begin:end]
        at = end
    return records


def standing_version(record: bytes, now_ms: int) -> int | None:
    """Version of a stored record; None of one that has expired or is of an unknown format: any other replaces it."""
    if len(record) < _HEAD.size:
        return None
    record_format, end_ms, version = _HEAD.unpack_from(record)
    return version if record_format == RECORD_FORMAT and end_ms > now_ms else None


def decode_loads(stored: Iterable[tuple[int, bytes]], now_ms: int) -> dict[int, IncarnationLoad]:
    """`decode_load` by incarnation; one of whose records all are expired or unknown is absent."""
    loads: dict[int, IncarnationLoad] = {}
    for incarnation, value in stored:
        load = decode_load(value, now_ms)
        if load.worker is not None or load.proxies:
            loads[incarnation] = load
    return loads


@lru_cache(maxsize=_MOST_REMEMBERED)
def decode_load(value: bytes, now_ms: int) -> IncarnationLoad:
    """What the load of an incarnation says at Redis time `now_ms`; expired and unknown records are left out.

    16 come with every match, most of them the same as with the last one: under a microsecond each.
    """
    written = _read(value)
    left_ms = written.worker_end_ms - now_ms
    worker = written.worker if left_ms > 0 else None
    if worker is not None and worker.rest_s:
        worker = replace(worker, rest_s=_counted_down(worker.rest_s, left_ms))
    proxies: dict[str, ProxyLoad] = {}
    for proxy_id, end_ms, sent in written.proxies:
        left_ms = end_ms - now_ms
        if left_ms > 0:
            if sent.prefilling_s:
                sent = replace(sent, prefilling_s=_counted_down(sent.prefilling_s, left_ms))
            proxies[proxy_id] = sent
    return IncarnationLoad(worker=worker, proxies=proxies)


def _are_sane(*numbers: float) -> bool:
    """Whether Redis holds what a worker or proxy may have written: no NaN, infinity or negative time."""
    return all(0.0 <= number <= _MOST for number in numbers)


class _Written(msgspec.Struct, frozen=True, gc=False):
    """A value as it was written: every record with the ms at which it ends."""

    worker: WorkerLoad | None
    worker_end_ms: int
    proxies: tuple[tuple[str, int, ProxyLoad], ...]


@lru_cache(maxsize=_MOST_REMEMBERED)
def _read(value: bytes) -> _Written:
    """Records of an unknown format, too short ones, and those with a number that cannot be are left out."""
    worker: WorkerLoad | None = None
    worker_end_ms = 0
    proxies: list[tuple[str, int, ProxyLoad]] = []
    for writer, record in records_of(value).items():
        known = _WORKER_RECORD if writer == WORKER_WRITER else _PROXY_RECORD
        if len(record) < known.size or record[0] != RECORD_FORMAT:
            continue
        if writer == WORKER_WRITER:
            _, end_ms, version, rest_s, rate, itl_s, oldest_age_s, available, draining = known.unpack_from(record)
            free_blocks, sliced_s = _UNKNOWN_BLOCKS, NO_WAITING
            if len(record) >= known.size + _WORKER_TAIL.size:
                free_blocks, *by_class_s = _WORKER_TAIL.unpack_from(record, known.size)
                sliced_s = tuple(by_class_s)
            if not _are_sane(rest_s, rate, itl_s, oldest_age_s, *sliced_s):
                continue
            worker_end_ms = end_ms
            worker = WorkerLoad(
                version=version,
                rest_s=rest_s,
                sliced_s=sliced_s,
                prefill_rate=rate if rate >= _LEAST_RATE else 0.0,
                inter_token_latency_s=itl_s,
                available_blocks=available,
                free_blocks=free_blocks if free_blocks != _UNKNOWN_BLOCKS else None,
                oldest_age_s=oldest_age_s,
                is_draining=draining != 0,
            )
        else:
            _, end_ms, version, running, prefilling_s, *waiting_s = known.unpack_from(record)
            recent_tokens = 0.0
            if len(record) >= known.size + _PROXY_TAIL.size:
                (recent_tokens,) = _PROXY_TAIL.unpack_from(record, known.size)
            if not _are_sane(prefilling_s, *waiting_s, recent_tokens):
                continue
            sent = ProxyLoad(
                version=version,
                running=running,
                prefilling_s=prefilling_s,
                waiting_s=tuple(waiting_s),
                recent_tokens=recent_tokens,
            )
            proxies.append((writer.hex(), end_ms, sent))
    return _Written(worker, worker_end_ms, tuple(proxies))


def _counted_down(duration_s: float, left_ms: int) -> float:
    """By the age of a record that counts for `left_ms` more; one whose clock went back has none."""
    age_s = LOAD_RECORD_S - left_ms / 1_000
    if age_s <= 0.0:
        return duration_s
    return duration_s - age_s if duration_s > age_s else 0.0
