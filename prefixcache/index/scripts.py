"""The Lua scripts of the index: each is constants, shared parts and its own file from scripts/."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

from prefixcache.index.keys import FIRST_BITS, INCARNATION_BITS, INLINE_CLAIMS, LONG_CLAIMS

_CONSTANTS = f"""\
local FIRST_BITS, INCARNATION_BITS = {FIRST_BITS}, {INCARNATION_BITS}
local INLINE_CLAIMS, LONG_CLAIMS = {INLINE_CLAIMS}, {LONG_CLAIMS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script as the server caches it."""

    name: str
    text: str
    sha1: str
    """The name under which EVALSHA finds it."""


def _compose(name: str, *parts: str) -> Script:
    folder = resources.files(__package__) / "scripts"
    texts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in (*parts, name)]
    text = "\n".join((_CONSTANTS, *texts))
    return Script(name=name, text=text, sha1=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


REGISTER: Final = _compose("register", "preamble")
RENEW: Final = _compose("renew", "preamble")
RETIRE: Final = _compose("retire", "preamble")
MATCH: Final = _compose("match", "preamble", "buckets")
APPLY: Final = _compose("apply", "preamble", "buckets")
WITHDRAW: Final = _compose("withdraw")
