"""Proofs of the worker token: each is good for one role on one stream to one address, and for nothing else."""

from __future__ import annotations

import hmac
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.errors import ConfigError, ProtocolError
from prefixcache.worker_token import (
    MIN_TOKEN_BYTES,
    NONCE_BYTES,
    Exchange,
    Role,
    check_nonce,
    check_token,
    new_nonce,
)

TOKEN = b"0123456789abcdef0123456789abcdef"
EXCHANGE = Exchange(
    token=TOKEN,
    proxy_nonce=bytes(range(16)),
    worker_nonce=bytes(range(16, 32)),
    namespace="0123456789abcdef",
    address="10.0.0.1:7001",
)

exchanges = st.builds(
    Exchange,
    token=st.binary(min_size=1, max_size=3),
    proxy_nonce=st.binary(max_size=3),
    worker_nonce=st.binary(max_size=3),
    namespace=st.text("ab", max_size=3),
    address=st.text("ab", max_size=3),
)


def is_right(exchange: Exchange, role: Role, proof: bytes) -> bool:
    try:
        exchange.check(role, proof)
    except ProtocolError:
        return False
    return True


def test_the_proof_is_what_the_protocol_says() -> None:
    """Written out: another implementation must get the same bytes."""
    message = b"".join(
        len(part).to_bytes(4, "big") + part
        for part in (
            b"prefixcache worker token 1",
            b"worker",
            b"0123456789abcdef",
            b"10.0.0.1:7001",
            bytes(range(16)),
            bytes(range(16, 32)),
        )
    )
    assert EXCHANGE.proof("worker") == hmac.new(TOKEN, message, "sha256").digest()
    assert EXCHANGE.proof("worker").hex() == "721bfde1f632682f64e8517d52d074aae22ffc72c83f4d9f4ee0c4989ecd3e73"


def test_each_side_accepts_the_other() -> None:
    EXCHANGE.check("worker", EXCHANGE.proof("worker"))
    EXCHANGE.check("proxy", EXCHANGE.proof("proxy"))


def test_a_proof_sent_back_proves_nothing() -> None:
    assert not is_right(EXCHANGE, "proxy", EXCHANGE.proof("worker"))
    assert not is_right(EXCHANGE, "worker", EXCHANGE.proof("proxy"))
    swapped = replace(EXCHANGE, proxy_nonce=EXCHANGE.worker_nonce, worker_nonce=EXCHANGE.proxy_nonce)
    assert not is_right(EXCHANGE, "proxy", swapped.proof("worker"))
    assert not is_right(EXCHANGE, "proxy", swapped.proof("proxy"))


@pytest.mark.parametrize(
    "other",
    [
        replace(EXCHANGE, token=TOKEN[:-1] + b"0"),
        replace(EXCHANGE, proxy_nonce=bytes(16)),
        replace(EXCHANGE, worker_nonce=bytes(16)),
        replace(EXCHANGE, namespace="f" * 16),
        replace(EXCHANGE, address="10.0.0.2:7001"),
    ],
)
def test_a_proof_of_another_stream_proves_nothing(other: Exchange) -> None:
    for role in get_args(Role):
        assert not is_right(EXCHANGE, role, other.proof(role))


@pytest.mark.parametrize("proof", [b"", b"\0" * 32, EXCHANGE.proof("proxy")[:-1], EXCHANGE.proof("proxy") + b"\0"])
def test_a_proof_that_is_cut_or_empty_proves_nothing(proof: bytes) -> None:
    with pytest.raises(ProtocolError, match="set the same PREFIXCACHE_WORKER_TOKEN on every proxy and worker"):
        EXCHANGE.check("proxy", proof)


@given(st.lists(exchanges, min_size=2, max_size=4, unique=True))
def test_no_two_exchanges_have_a_proof_in_common(some: list[Exchange]) -> None:
    """Fields next to each other cannot lend each other bytes."""
    proofs = [exchange.proof(role) for exchange in some for role in get_args(Role)]
    assert len(set(proofs)) == len(proofs)


def test_neither_token_nor_proof_is_in_what_may_be_logged() -> None:
    assert "0123456789abcdef0123" not in repr(EXCHANGE)
    with pytest.raises(ProtocolError) as caught:
        EXCHANGE.check("proxy", b"guess")
    assert EXCHANGE.proof("proxy").hex() not in str(caught.value) and "guess" not in str(caught.value)


def test_nonces_are_fresh() -> None:
    nonces = [new_nonce() for _ in range(100)]
    assert len(set(nonces)) == 100 and {len(nonce) for nonce in nonces} == {NONCE_BYTES}


@pytest.mark.parametrize(
    ("nonce", "has_token", "complaint"),
    [
        (b"", False, None),
        (bytes(16), True, None),
        (bytes(16), False, "the proxy has a worker token and this worker has none: set the same"),
        (b"", True, "the proxy has no worker token and this worker has one: set the same"),
        (bytes(15), True, "a nonce of 15 bytes"),
        (bytes(17), True, "a nonce of 17 bytes"),
    ],
)
def test_a_nonce_says_whether_the_peer_has_a_token(nonce: bytes, has_token: bool, complaint: str | None) -> None:
    if complaint is None:
        check_nonce(nonce, peer="proxy", has_token=has_token)
        return
    with pytest.raises(ProtocolError, match=complaint):
        check_nonce(nonce, peer="proxy", has_token=has_token)


def test_the_setting() -> None:
    assert check_token(None) is None
    assert check_token("") is None
    assert check_token("0123456789abcdef") == b"0123456789abcdef"
    assert check_token("ä" * 8) == "ä".encode() * 8
    with pytest.raises(ConfigError, match=f"has 15 bytes; it must have at least {MIN_TOKEN_BYTES}") as caught:
        check_token("s3cret-s3cret-1")
    assert "s3cret" not in str(caught.value)
