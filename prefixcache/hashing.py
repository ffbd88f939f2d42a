"""Block hashes: the chain that names every prefix of a prompt.

    root ──> h[0] ──> h[1] ──> h[2] ──> h[3] ──> h[4] ...        h[i] = xxh3_64(h[i-1] || ids of block i)
             └──────── index block 0 ─────┘      └── index block 1 ...    named by h[3], h[7], ...

A hash covers the whole prefix, so a tree of prompts is walked by computing the next hash. xxh3 is fast and not
collision resistant against an adversary: hence the secret seed, the tenant in the root, and the worker's own
comparison of token ids before it reuses anything. Only full blocks have a hash.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Mapping

import xxhash

SCHEME_VERSION = 1


def framed(fields: Mapping[str, str]) -> bytes:
    """Tagged, length-framed fields: no two different mappings give the same bytes."""
    parts: list[bytes] = []
    for name, value in fields.items():
        for item in (name.encode(), value.encode()):
            parts.append(len(item).to_bytes(4, "little"))
            parts.append(item)
    return b"".join(parts)


def new_secret() -> bytes:
    """A random deployment secret."""
    return secrets.token_bytes(32)


def seed_of(secret: bytes) -> int:
    """64-bit xxh3 seed of a deployment secret of any length."""
    return int.from_bytes(hashlib.sha256(secret).digest()[:8], "little")


def root_hash(
    *,
    seed: int,
    model: str,
    revision: str,
    tokenizer_fingerprint: str,
    adapter: str = "",
    tenant: str = "",
    cache_salt: str = "",
) -> int:
    """Parent of block 0. Two prompts share KV only if every field here is equal. Only a proxy calls this."""
    fields = {
        "scheme": str(SCHEME_VERSION),
        "model": model,
        "revision": revision,
        "tokenizer": tokenizer_fingerprint,
        "adapter": adapter,
        "tenant": tenant,
        "cache_salt": cache_salt,
    }
    return xxhash.xxh3_64_intdigest(framed(fields), seed=seed)


def engine_root(
    *, seed: int, model: str, unit: str, tokenizer: str, index_block_units: int, cache_keys: Mapping[str, str]
) -> int:
    """Parent of index block 0 of a prompt for a plain engine; never that of a prompt for a worker of our own.

    `model` is the name by which it is served, which for an adapter is the adapter's; `tokenizer` the fingerprint of
    its files or, without them, "bytes"; `cache_keys` whatever the client sent to keep its prompts apart, by field.
    """
    fields = {
        "scheme": str(SCHEME_VERSION),
        "engine_model": model,
        "unit": unit,
        "tokenizer": tokenizer,
        "index_block": str(index_block_units),
        **{f"key:{name}": value for name, value in sorted(cache_keys.items())},
    }
    return xxhash.xxh3_64_intdigest(framed(fields), seed=seed)


def namespace(*, model: str, revision: str, tokenizer_fingerprint: str, block_size: int, stride: int) -> str:
    """16 hex digits that name the index two workers share. Adapter, tenant and salt enter the root hash only."""
    fields = {
        "scheme": str(SCHEME_VERSION),
        "model": model,
        "revision": revision,
        "tokenizer": tokenizer_fingerprint,
        "block_size": str(block_size),
        "stride": str(stride),
    }
    return hashlib.sha256(framed(fields)).hexdigest()[:16]


def engine_namespace() -> str:
    """16 hex digits that name the index of all plain engines of a deployment; all else that differs enters the root."""
    fields = {"scheme": str(SCHEME_VERSION), "kind": "plain engines"}
    return hashlib.sha256(framed(fields)).hexdigest()[:16]


def next_hash(parent: int, block: bytes) -> int:
    """Hash of one full block; `block` holds its ids as u32 little-endian bytes."""
    return xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + block)


def block_hashes(root: int, prompt: bytes, block_size: int) -> list[int]:
    """Chained hashes of every full block of `prompt`, ids packed by `types.pack_tokens`."""
    return chain(root, prompt, 4 * block_size)


def chain(root: int, units: bytes, width: int) -> list[int]:
    """Chained hashes of every full run of `width` bytes."""
    hashes: list[int] = []
    parent = root
    for start in range(0, len(units) - width + 1, width):
        parent = next_hash(parent, units[start : start + width])
        hashes.append(parent)
    return hashes


def index_hashes(hashes: list[int], stride: int) -> list[int]:
    """Hashes of the full index blocks: those of each one's last KV block."""
    return hashes[stride - 1 :: stride]


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """8 bytes big-endian each, so that the leading bits choose the index bucket."""
    values = tuple(hashes)
    return struct.pack(f">{len(values)}Q", *values)
