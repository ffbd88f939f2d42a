"""The Lua scripts of the index: each is constants, shared parts and its own file from scripts/."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

from prefixcache.index.base import MOST_PENDING, REQUEST_ID_BYTES
from prefixcache.index.family import GENERATIONS_A_CACHE, MOST_GENERATIONS
from prefixcache.index.keys import FIRST_BITS, INCARNATION_BITS, INLINE_CLAIMS, LONG_CLAIMS
from prefixcache.limits import LOAD_KEY_S, LOAD_RECORD_S, MATCH_LOADS
from prefixcache.load import HEAD_BYTES, RECORD_FORMAT, WRITER_BYTES

_CONSTANTS = f"""\
local FIRST_BITS, INCARNATION_BITS = {FIRST_BITS}, {INCARNATION_BITS}
local INLINE_CLAIMS, LONG_CLAIMS = {INLINE_CLAIMS}, {LONG_CLAIMS}
local MATCH_LOADS, RECORD_FORMAT = {MATCH_LOADS}, {RECORD_FORMAT}
local WRITER_BYTES, HEAD_BYTES = {WRITER_BYTES}, {HEAD_BYTES}
local LOAD_RECORD_MS, LOAD_KEY_MS = {round(LOAD_RECORD_S * 1_000)}, '{round(LOAD_KEY_S * 1_000)}'
local GENERATIONS_A_CACHE, MOST_GENERATIONS = {GENERATIONS_A_CACHE}, {MOST_GENERATIONS}
local REQUEST_ID_BYTES, PENDING_BYTES, MOST_PENDING = {REQUEST_ID_BYTES}, {12 + REQUEST_ID_BYTES}, {MOST_PENDING}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script as the server caches it."""

    name: str
    text: str
    sha1: str
    """The name under which EVALSHA finds it."""


_WRITES_WITHOUT_MEMORY = "#!lua flags=allow-oom\n"
"""Records, leases, loads and the secret are bounded by the number of processes: a full server must neither lose workers
nor refuse any. Since Redis 7.0, which is the oldest that is supported."""


def _compose(name: str, *parts: str, head: str = "") -> Script:
    folder = resources.files(__package__) / "scripts"
    texts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in (*parts, name)]
    text = head + "\n".join((_CONSTANTS, *texts))
    return Script(name=name, text=text, sha1=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


REGISTER: Final = _compose("register", "preamble", "incarnations", head=_WRITES_WITHOUT_MEMORY)
RENEW: Final = _compose("renew", "preamble", "loads", head=_WRITES_WITHOUT_MEMORY)
RETIRE: Final = _compose("retire", "preamble", "incarnations", head=_WRITES_WITHOUT_MEMORY)
COMMIT: Final = _compose("commit", "preamble", "loads")
EXCHANGE_LOADS: Final = _compose("exchange_loads", "preamble", "loads", head=_WRITES_WITHOUT_MEMORY)
MATCH: Final = _compose("match", "preamble", "buckets")
APPLY: Final = _compose("apply", "preamble", "buckets", "bucket_writes")
OPEN_FAMILY: Final = _compose("open_family", "preamble", "incarnations", "family", head=_WRITES_WITHOUT_MEMORY)
FAMILIES: Final = _compose("families", "preamble", "incarnations", "family", head=_WRITES_WITHOUT_MEMORY)
CLAIM: Final = _compose("claim", "preamble", "incarnations", "family", "buckets", "bucket_writes")
SWEEP: Final = _compose("sweep", "preamble", "incarnations", "family", "buckets")
WITHDRAW: Final = _compose("withdraw")
WRITE: Final = _compose("write", head=_WRITES_WITHOUT_MEMORY)

ALL: Final = tuple(value for value in list(globals().values()) if isinstance(value, Script))
"""Every script above; a new one is in it by standing above."""
