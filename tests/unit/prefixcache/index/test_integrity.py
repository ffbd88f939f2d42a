"""Every invariant is really looked at: each broken content below is found."""

from __future__ import annotations

from copy import deepcopy

import pytest

from prefixcache.errors import IntegrityError
from prefixcache.index.integrity import Content, check_content
from prefixcache.index.keys import LONG_MARKER, NamespaceKeys
from prefixcache.load import WORKER_WRITER, stored_load

KEYS = NamespaceKeys(key_prefix="p", namespace="0123456789abcdef")
FIELD = bytes([0x80, 1, 2, 3, 4, 5, 6])
OTHER = bytes([0x7F, 1, 2, 3, 4, 5, 6])
LONG_RUN = f"{KEYS.long_runs}0380010203040506"
PENDING = f"{KEYS.pending}0380010203040506"
LOAD = f"{KEYS.loads}1"


def run_of(*incarnations: int) -> bytes:
    return b"".join((incarnation << 2).to_bytes(4, "big") for incarnation in incarnations)


def ids_of(*incarnations: int) -> bytes:
    return b"".join(incarnation.to_bytes(4, "big") for incarnation in incarnations)


def pending_of(*incarnations: int) -> bytes:
    return b"".join(incarnation.to_bytes(4, "big") + bytes(8) + b"twelve bytes" for incarnation in incarnations)


def sound() -> Content:
    """Bucket 0 of 256 is divided; block 0080.. has two holders, block 0380.. has eight and two pending claims.

    1 is a worker, 2 a generation of an engine with its anchor 11; another engine's generations 15 and 13 lost their
    leases. Who else claims something is dead and not swept yet.
    """
    return deepcopy(
        Content(
            hashes={
                KEYS.meta: {b"k": b"8", b"split": b"1", b"fields": b"2", b"index_id": b"x"},
                KEYS.batches: {b"1": b"4", **{b"%d" % n: b"0" for n in (2, 11, 12, 14)}},
                KEYS.claims_held: {b"1": b"2", **{b"%d" % n: b"1" for n in range(3, 10)}, b"2": b"1"},
                f"{KEYS.buckets}9:1": {FIELD: run_of(1, 2)},
                f"{KEYS.buckets}8:3": {FIELD: LONG_MARKER},
                KEYS.families: {b"engine": ids_of(11, 14, 2), b"other": ids_of(12, 15, 13)},
            },
            strings={
                LONG_RUN: run_of(1, *range(3, 10)),
                PENDING: pending_of(2, 77),
                LOAD: stored_load({WORKER_WRITER: bytes(17), b"a proxy.": bytes(40)}),
                KEYS.keeper: b"k",
            },
            live={1, 2, 11, 12, 14},
        )
    )


def broken(name: str) -> Content:
    content = sound()
    hashes = {key: dict(fields) for key, fields in content.hashes.items()}
    strings = dict(content.strings)
    live = set(content.live)
    bucket, long_bucket = hashes[f"{KEYS.buckets}9:1"], hashes[f"{KEYS.buckets}8:3"]
    match name:
        case "fields miscounted":
            hashes[KEYS.meta][b"fields"] = b"3"
        case "claims miscounted":
            hashes[KEYS.claims_held][b"1"] = b"1"
        case "count of an incarnation without claims":
            hashes[KEYS.claims_held][b"77"] = b"0"
        case "run out of order":
            bucket[FIELD] = run_of(2, 1)
        case "incarnation twice in a run":
            bucket[FIELD] = run_of(1, 2, 2)
        case "run cut short":
            bucket[FIELD] = run_of(1, 2)[:7]
        case "empty run":
            bucket[FIELD] = b""
        case "field in the wrong half":
            bucket[OTHER] = bucket.pop(FIELD)
        case "field of a wrong length":
            bucket[FIELD[:6]] = bucket.pop(FIELD)
        case "bucket that was divided":
            hashes[f"{KEYS.buckets}8:0"] = hashes.pop(f"{KEYS.buckets}9:1")
        case "bucket of a later shape":
            hashes[f"{KEYS.buckets}9:6"] = hashes.pop(f"{KEYS.buckets}8:3")
        case "marker without its long run":
            del strings[LONG_RUN]
        case "long run without its marker":
            long_bucket.clear()
            hashes[KEYS.meta][b"fields"] = b"1"
        case "short run in a key of its own":
            strings[LONG_RUN] = run_of(*range(3, 10))
            hashes[KEYS.claims_held][b"1"] = b"1"
        case "long run in a bucket":
            bucket[FIELD] = run_of(*range(1, 14))
        case "lease without a batch number":
            live.add(9)
        case "batch number without a lease":
            live.discard(2)
        case "family cut short":
            hashes[KEYS.families][b"engine"] = ids_of(11, 14, 2)[:-1]
        case "family without a generation":
            hashes[KEYS.families][b"engine"] = ids_of(11, 14)
        case "family of too many generations":
            hashes[KEYS.families][b"engine"] = ids_of(11, 14, 2, *range(100, 108))
        case "family without an anchor":
            live.discard(11)
            del hashes[KEYS.batches][b"11"]
        case "anchor with claims":
            hashes[KEYS.families][b"engine"] = ids_of(1, 14, 2)
        case "id twice in a family":
            hashes[KEYS.families][b"engine"] = ids_of(11, 14, 14)
        case "generation of two engines":
            hashes[KEYS.families][b"other"] = ids_of(12, 15, 2)
        case "two claims of one engine on a block":
            hashes[KEYS.families][b"engine"] = ids_of(11, 14, 2, 1)
        case "stray key":
            hashes[f"{KEYS.base}:other"] = {b"a": b"b"}
        case "stray string":
            strings[f"{KEYS.base}:other"] = run_of(*range(3, 11))
        case "pending claims cut short":
            strings[PENDING] = pending_of(1, 2)[:-1]
        case "no pending claims":
            strings[PENDING] = b""
        case "too many pending claims":
            strings[PENDING] = pending_of(1, 2, 3, 4, 5)
        case "two pending claims of one incarnation":
            strings[PENDING] = pending_of(1, 2, 1)
        case "pending claims on no block":
            strings[f"{KEYS.pending}03800102030405"] = strings.pop(PENDING)
        case "keeper without an id":
            strings[KEYS.keeper] = b""
        case "load record without its head":
            strings[LOAD] += stored_load({b"a proxy?": bytes(16)})
        case "load record cut short":
            strings[LOAD] = strings[LOAD][:-1]
        case "no load records":
            strings[LOAD] = b""
        case "two load records of one writer":
            strings[LOAD] += stored_load({b"a proxy.": bytes(40)})
        case "load of an incarnation without a lease":
            strings[f"{KEYS.loads}9"] = strings[LOAD]
    return Content(hashes=hashes, strings=strings, live=live)


def test_sound_content_passes() -> None:
    check_content(KEYS, sound())
    check_content(KEYS, Content(hashes={}, strings={}, live=set()))


@pytest.mark.parametrize(
    "name",
    [
        "fields miscounted",
        "claims miscounted",
        "count of an incarnation without claims",
        "run out of order",
        "incarnation twice in a run",
        "run cut short",
        "empty run",
        "field in the wrong half",
        "field of a wrong length",
        "bucket that was divided",
        "bucket of a later shape",
        "marker without its long run",
        "long run without its marker",
        "short run in a key of its own",
        "long run in a bucket",
        "lease without a batch number",
        "batch number without a lease",
        "family cut short",
        "family without a generation",
        "family of too many generations",
        "family without an anchor",
        "anchor with claims",
        "id twice in a family",
        "generation of two engines",
        "two claims of one engine on a block",
        "stray key",
        "stray string",
        "pending claims cut short",
        "no pending claims",
        "too many pending claims",
        "two pending claims of one incarnation",
        "pending claims on no block",
        "keeper without an id",
        "load record without its head",
        "load record cut short",
        "no load records",
        "two load records of one writer",
        "load of an incarnation without a lease",
    ],
)
def test_broken_content_is_found(name: str) -> None:
    with pytest.raises(IntegrityError):
        check_content(KEYS, broken(name))


def test_nobody_claims_more_than_its_pool_holds() -> None:
    check_content(KEYS, sound(), {1: 2, 2: 1})
    with pytest.raises(IntegrityError, match="incarnation 1 claims 2 blocks, its pool holds 1"):
        check_content(KEYS, sound(), {1: 1, 2: 1})
