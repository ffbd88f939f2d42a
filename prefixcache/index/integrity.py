"""The invariants of an index in Redis, checked on everything that stands under a namespace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

from prefixcache.errors import IntegrityError
from prefixcache.index.base import MOST_PENDING, REQUEST_ID_BYTES
from prefixcache.index.family import MOST_GENERATIONS
from prefixcache.index.keys import FIRST_BITS, INLINE_CLAIMS, LONG_CLAIMS, LONG_MARKER, NamespaceKeys
from prefixcache.load import HEAD_BYTES, records_of, stored_load

PENDING_BYTES = 4 + 8 + REQUEST_ID_BYTES
_HASH_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All keys of a namespace by their type; `live` holds the incarnations that have a lease entry."""

    hashes: Mapping[str, Mapping[bytes, bytes]]
    strings: Mapping[str, bytes]
    live: Set[int]


def check_content(keys: NamespaceKeys, content: Content, most_claims: Mapping[int, int] = MappingProxyType({})) -> None:
    """Raises IntegrityError for the first invariant that does not hold.

    Claims of incarnations without a lease entry are allowed, until they are swept, and counted as all others are.
    `most_claims`: index blocks that the pool of an incarnation holds.
    """
    meta = content.hashes.get(keys.meta, {})
    bits, split = int(meta.get(b"k", FIRST_BITS)), int(meta.get(b"split", 0))
    held: Counter[int] = Counter()
    num_fields = 0
    long_runs: set[str] = set()
    engines = _engines_of_generations(keys, content)
    for name, fields in content.hashes.items():
        if name in (keys.meta, keys.batches, keys.claims_held, keys.families):
            continue
        bucket_bits, number = _bucket_of_name(keys, name, bits, split)
        for field, value in fields.items():
            num_fields += 1
            block = _block_hash(name, bucket_bits, number, field)
            if value == LONG_MARKER:
                long_run = f"{keys.long_runs}{block:016x}"
                long_runs.add(long_run)
                value = content.strings.get(long_run, b"")
                _require(
                    len(value) // 4 >= LONG_CLAIMS, f"{long_run}: {len(value) // 4} claims, few enough for a bucket"
                )
            else:
                _require(len(value) // 4 <= INLINE_CLAIMS, f"{name}: {len(value) // 4} claims in one field")
            incarnations = _incarnations(name, value)
            held.update(incarnations)
            of_engines = [engines[incarnation] for incarnation in incarnations if incarnation in engines]
            _require(
                len(set(of_engines)) == len(of_engines), f"{name}: two claims of one engine among {sorted(of_engines)}"
            )
    others = _check_strings(keys, content, long_runs)
    _require(not others, f"long runs {sorted(others)} without their other half")
    _require(num_fields == int(meta.get(b"fields", 0)), f"{num_fields} fields, counted {meta.get(b'fields')!r}")
    counted = {int(name): int(count) for name, count in content.hashes.get(keys.claims_held, {}).items()}
    _require(counted == dict(held), f"claims stored {dict(held)}, counted {counted}")
    for incarnation, most in most_claims.items():
        claims = counted.get(incarnation, 0)
        _require(claims <= most, f"incarnation {incarnation} claims {claims} blocks, its pool holds {most}")
    batches = {int(name) for name in content.hashes.get(keys.batches, {})}
    _require(batches == content.live, f"incarnations with a lease {content.live}, with a batch number {batches}")


def _engines_of_generations(keys: NamespaceKeys, content: Content) -> dict[int, bytes]:
    """Engine of each generation, from entries that are well formed."""
    engines: dict[int, bytes] = {}
    seen: set[int] = set()
    for engine, value in content.hashes.get(keys.families, {}).items():
        ids = [int.from_bytes(value[at : at + 4], "big") for at in range(0, len(value), 4)]
        _require(
            len(value) % 4 == 0 and 3 <= len(ids) <= 2 + MOST_GENERATIONS,
            f"engine {engine!r}: {len(value)} bytes of ids",
        )
        _require(len(set(ids) - seen) == len(ids), f"engine {engine!r}: ids {ids} are not its own, each once")
        anchor, *generations = ids
        _require(anchor in content.live, f"engine {engine!r}: its anchor {anchor} has no lease")
        _require(
            str(anchor).encode() not in content.hashes.get(keys.claims_held, {}),
            f"engine {engine!r}: its anchor {anchor} has claims",
        )
        seen.update(ids)
        engines.update(dict.fromkeys(generations, engine))
    return engines


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise IntegrityError(complaint)


def _bucket_of_name(keys: NamespaceKeys, name: str, bits: int, split: int) -> tuple[int, int]:
    """Bits and number in a bucket's key, which must be one that the present shape of the index has."""
    _require(name.startswith(keys.buckets), f"{name}: not a key of the index")
    bucket_bits, number = (int(part) for part in name[len(keys.buckets) :].split(":"))
    exists = (bucket_bits == bits and split <= number < 2**bits) or (bucket_bits == bits + 1 and number < 2 * split)
    _require(exists, f"{name}: no bucket of an index with k = {bits}, split = {split}")
    return bucket_bits, number


def _block_hash(name: str, bucket_bits: int, number: int, field: bytes) -> int:
    """The hash behind a field: its first byte stands in the bucket's number, as do the leading bits of the rest."""
    _require(len(field) == 7, f"{name}: field {field.hex()} has not 7 bytes")
    block = (number >> (bucket_bits - 8)) << 56 | int.from_bytes(field, "big")
    _require(block >> (64 - bucket_bits) == number, f"{name}: field {field.hex()} belongs into another bucket")
    return block


def _incarnations(name: str, run: bytes) -> list[int]:
    claims = [int.from_bytes(run[at : at + 4], "big") for at in range(0, len(run), 4)]
    incarnations = [claim >> 2 for claim in claims]
    _require(len(run) % 4 == 0 and len(run) > 0, f"{name}: a run of {len(run)} bytes")
    _require(claims == sorted(claims) and len(set(incarnations)) == len(incarnations), f"{name}: {claims} not sorted")
    return incarnations


def _check_strings(keys: NamespaceKeys, content: Content, long_runs: Set[str]) -> Set[str]:
    """Checks pending claims, loads and the keeper's office; returns the long runs that only one half speaks of."""
    found: set[str] = set()
    for name, value in content.strings.items():
        if name.startswith(keys.pending):
            _check_pending(name, name[len(keys.pending) :], value)
        elif name.startswith(keys.loads):
            _require(int(name[len(keys.loads) :]) in content.live, f"{name}: load of an incarnation without a lease")
            _check_load(name, value)
        elif name == keys.keeper:
            _require(len(value) > 0, f"{name}: a keeper without an id")
        else:
            _require(name.startswith(keys.long_runs), f"{name}: not a key of the index")
            found.add(name)
    return found ^ long_runs


def _check_pending(name: str, digits: str, value: bytes) -> None:
    _require(len(digits) == _HASH_DIGITS and set(digits) <= set("0123456789abcdef"), f"{name}: not the hash of a block")
    _require(
        len(value) % PENDING_BYTES == 0 and 0 < len(value) <= MOST_PENDING * PENDING_BYTES,
        f"{name}: {len(value)} bytes of pending claims",
    )
    incarnations = [int.from_bytes(value[at : at + 4], "big") for at in range(0, len(value), PENDING_BYTES)]
    _require(len(set(incarnations)) == len(incarnations), f"{name}: two pending claims of one of {incarnations}")


def _check_load(name: str, value: bytes) -> None:
    records = records_of(value)
    _require(stored_load(records) == value, f"{name}: {len(value)} bytes that are no entries, each of another writer")
    _require(len(records) > 0, f"{name}: a load without a record")
    for writer, record in records.items():
        _require(len(record) >= HEAD_BYTES, f"{name}: a record of {writer.hex()} of {len(record)} bytes")
