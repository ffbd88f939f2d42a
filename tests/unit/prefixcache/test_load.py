"""Load records: what survives the way through the store, and what is left out."""

from __future__ import annotations

import math
import secrets
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prefixcache.limits import LOAD_RECORD_S
from prefixcache.load import (
    NO_WAITING,
    NUM_WAITING_CLASSES,
    WAITING_CLASSES_S,
    WORKER_WRITER,
    IncarnationLoad,
    ProxyLoad,
    WorkerLoad,
    by_class,
    decode_load,
    decode_loads,
    new_proxy_id,
    proxy_writer,
    records_of,
    standing_version,
    stored_load,
    stored_record,
    waiting_class,
)

WRITTEN_MS = 1_000_000
END_MS = WRITTEN_MS + round(LOAD_RECORD_S * 1_000)
PROXY_ID = "00000000000000ab"
PROXY = proxy_writer(PROXY_ID)

F32 = st.floats(0, 2.0**30, width=32)
RATES = st.just(0.0) | st.floats(0.0625, 2.0**30, width=32)
VERSIONS = st.integers(0, 2**53)
WORKER_LOADS = st.builds(
    WorkerLoad,
    version=VERSIONS,
    rest_s=F32,
    prefill_rate=RATES,
    inter_token_latency_s=F32,
    sliced_s=st.tuples(*[F32] * NUM_WAITING_CLASSES),
    available_blocks=st.integers(0, 2**32 - 1),
    free_blocks=st.none() | st.integers(0, 2**32 - 2),
    oldest_age_s=F32,
    is_draining=st.booleans(),
)
PROXY_LOADS = st.builds(
    ProxyLoad,
    version=VERSIONS,
    running=st.integers(0, 2**32 - 1),
    prefilling_s=F32,
    waiting_s=st.tuples(*[F32] * NUM_WAITING_CLASSES),
    recent_tokens=F32,
)
WORKER = WorkerLoad(
    version=7,
    rest_s=2.5,
    sliced_s=(0.0, 0.0, 2.0, 0.0, 24.0),
    prefill_rate=1e4,
    inter_token_latency_s=0.25,
    available_blocks=9,
    free_blocks=4,
    oldest_age_s=8.0,
)
FIRST_WORKER_BYTES = 38
"""Of a worker's record as the first version wrote it: no `sliced_s`, no `free_blocks`."""
PROXY_LOAD = ProxyLoad(
    version=3, running=2, prefilling_s=1.5, waiting_s=(0.0, 0.5, 0.0, 4.0, 64.0), recent_tokens=512.0
)
FIRST_PROXY_BYTES = 45
"""Of a proxy's record as the first version wrote it: no `recent_tokens`."""


def decode_load_of(records: dict[bytes, bytes], now_ms: int) -> IncarnationLoad:
    return decode_load(stored_load(records), now_ms)


def stored(load: WorkerLoad | ProxyLoad, end_ms: int = END_MS) -> bytes:
    return stored_record(load.payload(), end_ms=end_ms, version=load.version)


@given(WORKER_LOADS, PROXY_LOADS)
def test_a_fresh_record_is_read_as_it_was_written(worker: WorkerLoad, proxy: ProxyLoad) -> None:
    fields = {WORKER_WRITER: stored(worker), PROXY: stored(proxy)}
    assert decode_load_of(fields, WRITTEN_MS) == IncarnationLoad(worker=worker, proxies={PROXY_ID: proxy})


def test_what_passes_by_itself_is_counted_down_by_the_age() -> None:
    load = decode_load_of({WORKER_WRITER: stored(WORKER), PROXY: stored(PROXY_LOAD)}, WRITTEN_MS + 1_000)
    assert load.worker is not None
    assert load.worker.rest_s == pytest.approx(1.5)
    assert (load.worker.prefill_rate, load.worker.oldest_age_s, load.worker.version) == (1e4, 8.0, 7)
    assert load.proxies[PROXY_ID].prefilling_s == pytest.approx(0.5)
    assert load.proxies[PROXY_ID].waiting_s == PROXY_LOAD.waiting_s
    late = decode_load_of({WORKER_WRITER: stored(WORKER), PROXY: stored(PROXY_LOAD)}, END_MS - 1)
    assert late.worker is not None
    assert (late.worker.rest_s, late.proxies[PROXY_ID].prefilling_s) == (0.0, 0.0)


def test_sums_by_class() -> None:
    assert by_class([]) == NO_WAITING
    assert by_class([0.25, 0.1, 16.5, 4.0, 2.0, 100.0]) == pytest.approx((0.35, 0.0, 6.0, 0.0, 116.5))


def test_a_clock_that_went_back_makes_no_record_younger_than_new() -> None:
    load = decode_load_of({WORKER_WRITER: stored(WORKER)}, WRITTEN_MS - 500)
    assert load.worker == WORKER


def test_a_record_ends_at_its_millisecond() -> None:
    fields = {WORKER_WRITER: stored(WORKER), PROXY: stored(PROXY_LOAD, END_MS + 1)}
    assert decode_load_of(fields, END_MS - 1).worker is not None
    assert decode_load_of(fields, END_MS) == IncarnationLoad(proxies=decode_load_of(fields, END_MS).proxies)
    assert list(decode_load_of(fields, END_MS).proxies) == [PROXY_ID]


@pytest.mark.parametrize("writer", [WORKER_WRITER, PROXY])
def test_unknown_format_and_a_short_record_are_left_out_and_a_longer_one_is_read(writer: bytes) -> None:
    record = stored(WORKER if writer == WORKER_WRITER else PROXY_LOAD)
    assert decode_load_of({writer: b"\2" + record[1:]}, WRITTEN_MS) == IncarnationLoad()
    for length in range(FIRST_WORKER_BYTES if writer == WORKER_WRITER else FIRST_PROXY_BYTES):
        assert decode_load_of({writer: record[:length]}, WRITTEN_MS) == IncarnationLoad()
    assert decode_load_of({writer: record + b"of a later version"}, WRITTEN_MS) == decode_load_of(
        {writer: record}, WRITTEN_MS
    )


def test_a_worker_of_an_earlier_version_tells_less() -> None:
    first = replace(WORKER, sliced_s=NO_WAITING, free_blocks=None)
    for length in range(FIRST_WORKER_BYTES, len(stored(WORKER))):
        assert decode_load_of({WORKER_WRITER: stored(WORKER)[:length]}, WRITTEN_MS).worker == first
    assert decode_load_of({WORKER_WRITER: stored(first)}, WRITTEN_MS).worker == first


def test_a_proxy_of_an_earlier_version_tells_nothing_of_what_it_placed_of_late() -> None:
    first = replace(PROXY_LOAD, recent_tokens=0.0)
    for length in range(FIRST_PROXY_BYTES, len(stored(PROXY_LOAD))):
        assert decode_load_of({PROXY: stored(PROXY_LOAD)[:length]}, WRITTEN_MS).proxies == {PROXY_ID: first}


def test_only_incarnations_with_a_record_that_counts_are_named() -> None:
    records = [(1, {WORKER_WRITER: stored(WORKER)}), (2, {PROXY: stored(PROXY_LOAD)}), (3, {}), (4, {PROXY: b"\2"})]
    values = [(incarnation, stored_load(of_one)) for incarnation, of_one in records]
    loads = decode_loads(values, WRITTEN_MS)
    assert loads == {1: IncarnationLoad(worker=WORKER), 2: IncarnationLoad(proxies={PROXY_ID: PROXY_LOAD})}
    assert decode_loads(values, END_MS) == {}


@given(st.dictionaries(st.binary(min_size=8, max_size=8), st.binary(max_size=255), max_size=5), st.integers(0))
def test_a_value_is_taken_apart_as_it_was_put_together(records: dict[bytes, bytes], cut: int) -> None:
    value = stored_load(records)
    assert list(records_of(value).items()) == list(records.items())
    left = records_of(value[: cut % (len(value) + 1)])
    assert list(left.items()) == list(records.items())[: len(left)]


def test_one_value_at_several_moments() -> None:
    """What is remembered of a value is what was written, not what was read of it last."""
    value = stored_load({WORKER_WRITER: stored(WORKER), PROXY: stored(PROXY_LOAD, END_MS + 1_000)})
    ages_s = (1.0, 0.0, 2.0, 0.5, 1.0)
    loads = [decode_load(value, WRITTEN_MS + round(age_s * 1_000)) for age_s in ages_s]
    assert [load.worker and load.worker.rest_s for load in loads] == [1.5, 2.5, 0.5, 2.0, 1.5]
    assert decode_load(value, END_MS).worker is None
    assert decode_load(value, END_MS + 1_000) == IncarnationLoad()
    assert decode_load(value, WRITTEN_MS) == IncarnationLoad(worker=WORKER, proxies={PROXY_ID: PROXY_LOAD})


def test_a_version_stands_until_the_record_ends() -> None:
    record = stored(WORKER)
    assert standing_version(record, END_MS - 1) == 7
    assert standing_version(record, END_MS) is None
    assert standing_version(b"\2" + record[1:], WRITTEN_MS) is None
    assert standing_version(record[:16], WRITTEN_MS) is None


def test_bytes_of_a_record() -> None:
    """Fixed for ever: workers and proxies of several versions read each other."""
    assert stored(WORKER) == struct.pack(
        ">BQQffffIBI5f", 1, END_MS, 7, 2.5, 1e4, 0.25, 8.0, 9, 0, 4, 0.0, 0.0, 2.0, 0.0, 24.0
    )
    assert stored(PROXY_LOAD) == struct.pack(">BQQIfffffff", 1, END_MS, 3, 2, 1.5, 0.0, 0.5, 0.0, 4.0, 64.0, 512.0)


def test_bytes_of_a_load() -> None:
    records = {bytes(8): b"of the worker", bytes(range(8)): b""}
    assert stored_load(records) == bytes(8) + b"\x0dof the worker" + bytes(range(8)) + b"\0"


def test_a_proxy_has_an_id_that_no_other_writer_has() -> None:
    ids = [new_proxy_id() for _ in range(1_000)]
    assert len({proxy_writer(proxy_id) for proxy_id in ids}) == 1_000
    assert all(len(proxy_id) == 16 for proxy_id in ids)
    assert proxy_writer("a1b2c3d4e5f60718") == bytes.fromhex("a1b2c3d4e5f60718")


def test_the_least_and_the_greatest_id_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for drawn, proxy_id in ((lambda below: 0, "0" * 15 + "1"), (lambda below: below - 1, "f" * 16)):
        monkeypatch.setattr(secrets, "randbelow", drawn)
        assert new_proxy_id() == proxy_id


@pytest.mark.parametrize("proxy_id", ["0" * 16, "", "a1", "a" * 18, "proxy"])
def test_what_is_no_id_of_a_proxy_is_refused(proxy_id: str) -> None:
    with pytest.raises(ValueError):
        proxy_writer(proxy_id)


def test_a_prefill_belongs_to_the_class_whose_bound_it_does_not_exceed() -> None:
    assert [waiting_class(prefill_s) for prefill_s in (0.0, 0.25, 0.26, 1.0, 4.0, 16.0, 16.1)] == [0, 0, 1, 1, 2, 3, 4]
    assert len(NO_WAITING) == NUM_WAITING_CLASSES == len(WAITING_CLASSES_S) + 1


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e30])
@pytest.mark.parametrize("name", ["rest_s", "prefill_rate", "inter_token_latency_s", "oldest_age_s"])
def test_a_worker_record_with_a_number_that_cannot_be_counts_for_nothing(name: str, number: float) -> None:
    worker = msgspec.structs.replace(WORKER, **{name: number})
    assert decode_load_of({WORKER_WRITER: stored(worker)}, WRITTEN_MS) == IncarnationLoad()


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e30])
def test_a_proxy_record_with_a_number_that_cannot_be_counts_for_nothing(number: float) -> None:
    for load in (
        msgspec.structs.replace(PROXY_LOAD, prefilling_s=number),
        msgspec.structs.replace(PROXY_LOAD, waiting_s=(*PROXY_LOAD.waiting_s[1:], number)),
        msgspec.structs.replace(PROXY_LOAD, recent_tokens=number),
    ):
        assert decode_load_of({PROXY: stored(load)}, WRITTEN_MS) == IncarnationLoad()


def test_a_rate_next_to_nothing_is_none() -> None:
    load = decode_load_of({WORKER_WRITER: stored(msgspec.structs.replace(WORKER, prefill_rate=1e-40))}, WRITTEN_MS)
    assert load.worker is not None
    assert load.worker.prefill_rate == 0.0
