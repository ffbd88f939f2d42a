"""Fixed vectors: a change of scheme must be seen, since old claims and new hashes would never meet again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixcache import hashing
from prefixcache.types import KV_BLOCK_SIZE, pack_tokens

SEED = hashing.seed_of(b"secret")
ROOT = 0xE9E9DB8CD2D4BA1A

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)
words = st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=4)


def root_of(**changed: str) -> int:
    fields = {"model": "m", "revision": "r", "tokenizer_fingerprint": "f", **changed}
    return hashing.root_hash(
        seed=SEED,
        model=fields["model"],
        revision=fields["revision"],
        tokenizer_fingerprint=fields["tokenizer_fingerprint"],
        adapter=fields.get("adapter", ""),
        tenant=fields.get("tenant", ""),
        cache_salt=fields.get("cache_salt", ""),
    )


def test_seed_vectors() -> None:
    assert SEED == 0xE3A31D7B530DB82B
    assert hashing.seed_of(b"") == 0x141CFC9842C4B0E3


def test_root_vectors() -> None:
    assert root_of() == ROOT
    assert root_of(adapter="a", tenant="t", cache_salt="s") == 0x18C69FE501E2E2D9


def engine_root_of(**changed: Any) -> int:
    fields = {"model": "m", "unit": "token", "tokenizer": "f", "index_block_units": 64, "cache_keys": {}, **changed}
    return hashing.engine_root(**{"seed": SEED, **fields})


def test_engine_root_vectors() -> None:
    assert engine_root_of(unit="byte", tokenizer="bytes", index_block_units=256) == 0x813E962E5DDBBBC8
    assert engine_root_of(cache_keys={"b": "2", "a": "1"}) == 0x717F477C683635FC
    assert engine_root_of(cache_keys={"b": "2", "a": "1"}) == engine_root_of(cache_keys={"a": "1", "b": "2"})


def test_every_field_of_an_engine_root_counts() -> None:
    changes: list[dict[str, Any]] = [
        *({}, {"seed": 1}, {"model": "n"}, {"unit": "byte"}, {"tokenizer": "g"}, {"index_block_units": 128}),
        *({"cache_keys": {"a": "1"}}, {"cache_keys": {"b": "1"}}, {"cache_keys": {"a": ""}}),
    ]
    roots = {engine_root_of(**change) for change in changes}
    assert len(roots) == len(changes)
    assert root_of() not in roots


def test_namespace_vector() -> None:
    name = hashing.namespace(model="m", revision="r", tokenizer_fingerprint="f", block_size=16, stride=4)
    assert name == "da35e0b1058170d3"


def test_chain_vectors() -> None:
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2  # the reference implementation's own vector
    assert hashing.next_hash(0, b"") == 0xC77B3ABB6F87ACD9
    assert hashing.next_hash(2**64 - 1, pack_tokens([0, 1, 2**32 - 1])) == 0xB3EA067EC45E7B4B
    chain = hashing.block_hashes(ROOT, pack_tokens(range(40)), KV_BLOCK_SIZE)
    assert chain == [0x12DCAE4D393CC8D8, 0xF7E21264488F9BE8]


def test_frame_vector() -> None:
    assert hashing.framed({"a": "b", "cd": ""}) == b"\1\0\0\0a\1\0\0\0b\2\0\0\0cd\0\0\0\0"


def test_every_field_changes_the_root() -> None:
    fields = ("model", "revision", "tokenizer_fingerprint", "adapter", "tenant", "cache_salt")
    roots = {root_of(**{field: "x"}) for field in fields}
    assert len(roots | {root_of()}) == len(fields) + 1
    other = hashing.root_hash(seed=SEED + 1, model="m", revision="r", tokenizer_fingerprint="f")
    assert other not in roots | {root_of()}


def test_every_field_changes_the_namespace() -> None:
    def named(model: str = "m", revision: str = "r", print_: str = "f", size: int = 16, stride: int = 4) -> str:
        return hashing.namespace(
            model=model, revision=revision, tokenizer_fingerprint=print_, block_size=size, stride=stride
        )

    names = {named(), named(model="x"), named(revision="x"), named(print_="x"), named(size=32), named(stride=1)}
    assert len(names) == 6


@given(words, words)
def test_frames_tell_different_fields_apart(one: dict[str, str], two: dict[str, str]) -> None:
    assert (hashing.framed(one) == hashing.framed(two)) == (list(one.items()) == list(two.items()))


@given(tokens, st.sampled_from([1, 4, 16]))
def test_chain_is_that_of_next_hash_over_full_blocks(ids: list[int], block_size: int) -> None:
    hashes = hashing.block_hashes(ROOT, pack_tokens(ids), block_size)
    assert len(hashes) == len(ids) // block_size
    for number, (parent, block_hash) in enumerate(pairwise([ROOT, *hashes])):
        block = pack_tokens(ids[number * block_size : (number + 1) * block_size])
        assert block_hash == hashing.next_hash(parent, block)


@given(st.binary(max_size=60), st.sampled_from([1, 7, 16]))
def test_a_chain_over_bytes_has_a_hash_for_every_full_run(units: bytes, width: int) -> None:
    hashes = hashing.chain(ROOT, units, width)
    assert len(hashes) == len(units) // width
    for number, (parent, block_hash) in enumerate(pairwise([ROOT, *hashes])):
        assert block_hash == hashing.next_hash(parent, units[number * width : (number + 1) * width])


@given(tokens, tokens)
def test_chains_agree_exactly_as_far_as_the_prompts_do(one: list[int], two: list[int]) -> None:
    first, second = (hashing.block_hashes(ROOT, pack_tokens(ids), 4) for ids in (one, two))
    for number, (left, right) in enumerate(zip(first, second, strict=False), start=1):
        assert (left == right) == (one[: 4 * number] == two[: 4 * number])


def test_index_hashes_are_those_of_the_last_block_of_each_full_index_block() -> None:
    assert hashing.index_hashes(list(range(11)), 4) == [3, 7]
    assert hashing.index_hashes([0, 1, 2], 4) == []
    assert hashing.index_hashes([5, 6], 1) == [5, 6]


def test_packed_hashes_lead_with_their_highest_bits() -> None:
    assert hashing.pack_hashes([1, 0xFF00000000000000]) == bytes(7) + b"\1\xff" + bytes(7)
