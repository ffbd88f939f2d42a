"""Every invariant is really looked at: each broken content below is found."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

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


@dataclass(slots=True, kw_only=True)
class Draft:
    """Content that can be changed."""

    hashes: dict[str, dict[bytes, bytes]]
    strings: dict[str, bytes]
    live: set[int]


def broken(name: str) -> Content:
    content = sound()
    draft = Draft(
        hashes={key: dict(fields) for key, fields in content.hashes.items()},
        strings=dict(content.strings),
        live=set(content.live),
    )
    for break_part in (break_buckets, break_families, break_other_keys):
        break_part(name, draft)
    return Content(hashes=draft.hashes, strings=draft.strings, live=draft.live)


def break_buckets(name: str, draft: Draft) -> None:
    bucket, long_bucket = draft.hashes[f"{KEYS.buckets}9:1"], draft.hashes[f"{KEYS.buckets}8:3"]
    match name:
        case "fields miscounted":
            draft.hashes[KEYS.meta][b"fields"] = b"3"
        case "claims miscounted":
            draft.hashes[KEYS.claims_held][b"1"] = b"1"
        case "count of an incarnation without claims":
            draft.hashes[KEYS.claims_held][b"77"] = b"0"
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
            draft.hashes[f"{KEYS.buckets}8:0"] = draft.hashes.pop(f"{KEYS.buckets}9:1")
        case "bucket of a later shape":
            draft.hashes[f"{KEYS.buckets}9:6"] = draft.hashes.pop(f"{KEYS.buckets}8:3")
        case "marker without its long run":
            del draft.strings[LONG_RUN]
        case "long run without its marker":
            long_bucket.clear()
            draft.hashes[KEYS.meta][b"fields"] = b"1"
        case "short run in a key of its own":
            draft.strings[LONG_RUN] = run_of(*range(3, 10))
            draft.hashes[KEYS.claims_held][b"1"] = b"1"
        case "long run in a bucket":
            bucket[FIELD] = run_of(*range(1, 14))


def break_families(name: str, draft: Draft) -> None:
    """Leases, too."""
    match name:
        case "lease without a batch number":
            draft.live.add(9)
        case "batch number without a lease":
            draft.live.discard(2)
        case "family cut short":
            draft.hashes[KEYS.families][b"engine"] = ids_of(11, 14, 2)[:-1]
        case "family without a generation":
            draft.hashes[KEYS.families][b"engine"] = ids_of(11, 14)
        case "family of too many generations":
            draft.hashes[KEYS.families][b"engine"] = ids_of(11, 14, 2, *range(100, 108))
        case "family without an anchor":
            draft.live.discard(11)
            del draft.hashes[KEYS.batches][b"11"]
        case "anchor with claims":
            draft.hashes[KEYS.families][b"engine"] = ids_of(1, 14, 2)
        case "id twice in a family":
            draft.hashes[KEYS.families][b"engine"] = ids_of(11, 14, 14)
        case "generation of two engines":
            draft.hashes[KEYS.families][b"other"] = ids_of(12, 15, 2)
        case "two claims of one engine on a block":
            draft.hashes[KEYS.families][b"engine"] = ids_of(11, 14, 2, 1)


def break_other_keys(name: str, draft: Draft) -> None:
    match name:
        case "stray key":
            draft.hashes[f"{KEYS.base}:other"] = {b"a": b"b"}
        case "stray string":
            draft.strings[f"{KEYS.base}:other"] = run_of(*range(3, 11))
        case "pending claims cut short":
            draft.strings[PENDING] = pending_of(1, 2)[:-1]
        case "no pending claims":
            draft.strings[PENDING] = b""
        case "too many pending claims":
            draft.strings[PENDING] = pending_of(1, 2, 3, 4, 5)
        case "two pending claims of one incarnation":
            draft.strings[PENDING] = pending_of(1, 2, 1)
        case "pending claims on no block":
            draft.strings[f"{KEYS.pending}03800102030405"] = draft.strings.pop(PENDING)
        case "keeper without an id":
            draft.strings[KEYS.keeper] = b""
        case "load record without its head":
            draft.strings[LOAD] += stored_load({b"a proxy?": bytes(16)})
        case "load record cut short":
            draft.strings[LOAD] = draft.strings[LOAD][:-1]
        case "no load records":
            draft.strings[LOAD] = b""
        case "two load records of one writer":
            draft.strings[LOAD] += stored_load({b"a proxy.": bytes(40)})
        case "load of an incarnation without a lease":
            draft.strings[f"{KEYS.loads}9"] = draft.strings[LOAD]


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
