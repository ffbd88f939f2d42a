"""The worker token: proxy and worker prove to each other that they know it, before a prompt is sent.

    proxy                                          worker
      hello {nonce p} ──────────────────────────►
            ◄────────────────────────────────────  hello {nonce w, proof of the worker}
      prove {proof of the proxy} ────────────────►                                          then `generate`

    proof = HMAC-SHA256(token, label, role, namespace, address, nonce p, nonce w)      each field after its length

Both nonces are fresh for each stream, so a proof is worth nothing on another one. The role is in it, so a proof cannot
be sent back to where it came from. The address is the one in the worker's record, to which the proxy connected: whoever
gets a record of his own into the registry cannot answer with what a true worker says to him.

A nonce stands in a hello exactly if that side has a token, so each side can say at once what the other one lacks.
A worker answers whoever connects, and the answer can be used to try tokens at leisure: hence MIN_TOKEN_BYTES.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Literal

from prefixcache.errors import ConfigError, ProtocolError

NONCE_BYTES = 16
MIN_TOKEN_BYTES = 16
ENVIRONMENT_NAME = "PREFIXCACHE_WORKER_TOKEN"
MEND = f"set the same {ENVIRONMENT_NAME} on every proxy and worker"

_LABEL = b"prefixcache worker token 1"

Role = Literal["proxy", "worker"]


def check_token(text: str | None) -> bytes | None:
    """The token of a setting; None if it is absent or empty. Raises ConfigError if it can be guessed."""
    if not text:
        return None
    token = text.encode("utf-8", "surrogateescape")
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"the worker token has {len(token)} bytes; it must have at least {MIN_TOKEN_BYTES}, such as those of "
            "`openssl rand -hex 16`"
        )
    return token


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def check_nonce(nonce: bytes, *, peer: Role, has_token: bool) -> None:
    """Raises ProtocolError unless the peer's nonce says that it has a token exactly if this side has one."""
    this: Role = "proxy" if peer == "worker" else "worker"
    if nonce and not has_token:
        raise ProtocolError(f"the {peer} has a worker token and this {this} has none: {MEND}")
    if has_token and not nonce:
        raise ProtocolError(f"the {peer} has no worker token and this {this} has one: {MEND}")
    if nonce and len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"the {peer} sent a nonce of {len(nonce)} bytes, not {NONCE_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What both sides of one stream know of it, where both have a token."""

    token: bytes = field(repr=False)
    proxy_nonce: bytes
    worker_nonce: bytes
    namespace: str
    address: str
    """As in the worker's record."""

    def proof(self, role: Role) -> bytes:
        """What the side of that role sends."""
        texts = (role, self.namespace, self.address)
        parts = (_LABEL, *(text.encode() for text in texts), self.proxy_nonce, self.worker_nonce)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self.token, message, "sha256")

    def check(self, role: Role, proof: bytes) -> None:
        """Raises ProtocolError unless the side of that role has proven that it knows the token."""
        if not hmac.compare_digest(self.proof(role), proof):
            raise ProtocolError(f"the {role} has another worker token: {MEND}")
