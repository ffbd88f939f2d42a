"""Every Redis key of the project. P is the deployment's key prefix, {ns} the namespace and at once the hash tag.

    key                       type    holds                                         lives             written by
    P:{ns}:meta               HASH    see below                                     for ever          see below
    P:{ns}:live               ZSET    incarnation -> end of lease, ms Redis time    until retired     givers, renewers
    P:{ns}:seq                HASH    incarnation -> number of its last batch       until retired     givers, apply
    P:{ns}:gen                HASH    plain engine -> its family, see below         while its anchor  open_family, claim
    P:{ns}:n                  HASH    incarnation -> claims it holds in buckets     while above 0     writers of claims
    P:{ns}:b:<bits>:<number>  HASH    last 7 bytes of a block's hash -> its claims  while it has any  writers of claims
    P:{ns}:h:<hash>           STRING  claims of an index block with many holders    while it has many writers of claims
    P:{ns}:p:<hash>           STRING  pending claims on a boundary block            PX until all end  commit
    P:{ns}:l:<incarnation>    STRING  load records of the worker and of proxies     PX LOAD_KEY_S,    renew, commit,
                                                                                    until retired     exchange_loads
    P:{ns}:keeper             STRING  id of the keeper                              PX KEEPER_S       sweep
    P:reg                     HASH    worker id -> its record, JSON                 until withdrawn   RedisRegistry
    P:spaces                  SET     namespaces that any record ever named         until swept       RedisRegistry
    P:secret                  STRING  deployment secret, seed of every root hash    for ever          RedisStore

Givers of ids are register (for a worker), open_family and claim (for a plain engine); renewers of leases are renew and
families; writers of claims are apply, claim and sweep. A lease is a score and no TTL, so that an expired one can come
back; "until retired" is also until the keeper finds that it ended DEAD_AFTER_S ago. All keys of a namespace lie in one
slot of a Redis Cluster; scripts get `meta` as KEYS[1] and build the others from it, and use none of P:reg, P:spaces
and P:secret. <hash> is 16 hex digits.

    field of meta             holds                                                                   written by
    index_id, scheme          random name of this content; version of the hash scheme                 register
    last_id                   the incarnation given last                                              givers
    fields, k, split          fields in all buckets; the shape of the buckets, see below              writers of claims
    swept_at, watched_since   ms Redis time: last call of a keeper, begin of its unbroken watch       sweep
    cursor                    where the keeper goes on: leading 32 bits of a hash                     sweep
    dying                     whose claims it was removing when its last round ended, u32 big-endian  sweep

Buckets grow by linear hashing. The number of a block's bucket is the top k bits of its hash; if that is below `split`,
that bucket was divided already and the top k + 1 bits count:

    k = 8, split = 2        b:9:0 b:9:1 b:9:2 b:9:3 | b:8:2  b:8:3  ...  b:8:255
                            \\__ of 0 __/ \\__ of 1 __/   ^ divided next; after 255: k = 9, split = 0

A family is the u32 big-endian ids of its anchor, its next generation, the newest and the older ones, from new to old;
`index/family.py` draws it.

A value is a sorted run of claims, u32 big-endian `incarnation << 2 | tier`. A 13th holder moves the run to h:<hash> and
leaves the marker ffffffff in the bucket; with fewer than 8 left it moves back.

Pending claims are up to MOST_PENDING entries of 24 bytes, big-endian, one an incarnation, in the order in which they
were written last; a writer drops those that have ended:

    u32 incarnation | u64 end, ms Redis time | 12 bytes request id

`prefixcache/load.py` draws the records of a load.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.errors import ConfigError

DEFAULT_KEY_PREFIX = "prefixcache"

FIRST_BITS = 8
"""k of an empty index: a field keeps the hash without its first byte, which the bucket number therefore must have."""
FIELDS_PER_BUCKET = 44
"""Mean number of fields at which a bucket is divided: stays a listpack, 17.6-20 bytes a block at one holder."""
INLINE_CLAIMS = 12
"""Most claims of one block inside the bucket."""
LONG_CLAIMS = 8
"""Fewest claims of one block in a key of its own."""
LONG_MARKER = b"\xff\xff\xff\xff"
INCARNATION_BITS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceKeys:
    """The keys of one namespace."""

    key_prefix: str
    namespace: str

    @property
    def base(self) -> str:
        return f"{self.key_prefix}:{{{self.namespace}}}"

    @property
    def meta(self) -> str:
        return f"{self.base}:meta"

    @property
    def live(self) -> str:
        return f"{self.base}:live"

    @property
    def batches(self) -> str:
        return f"{self.base}:seq"

    @property
    def families(self) -> str:
        return f"{self.base}:gen"

    @property
    def claims_held(self) -> str:
        return f"{self.base}:n"

    @property
    def buckets(self) -> str:
        """What the keys of all buckets begin with; <bits>:<number> follows."""
        return f"{self.base}:b:"

    @property
    def long_runs(self) -> str:
        """What the keys of all long runs begin with; 16 hex digits of the block's hash follow."""
        return f"{self.base}:h:"

    @property
    def pending(self) -> str:
        """What the keys of all pending claims begin with; 16 hex digits of the block's hash follow."""
        return f"{self.base}:p:"

    @property
    def loads(self) -> str:
        """What the keys of all loads begin with; the incarnation follows."""
        return f"{self.base}:l:"

    @property
    def keeper(self) -> str:
        return f"{self.base}:keeper"


def registry_key(key_prefix: str) -> str:
    return f"{key_prefix}:reg"


def namespaces_key(key_prefix: str) -> str:
    return f"{key_prefix}:spaces"


def secret_key(key_prefix: str) -> str:
    return f"{key_prefix}:secret"


def check_key_prefix(key_prefix: str) -> None:
    """Raises ConfigError for a prefix that would move the hash tag or break a line of a log."""
    if not key_prefix or not key_prefix.isprintable() or set(key_prefix) & set("{} "):
        raise ConfigError(f"key prefix {key_prefix!r} must be printable, without blanks, '{{' and '}}'")
