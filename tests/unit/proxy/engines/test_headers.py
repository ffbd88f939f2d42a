"""What passes between clients and engines, and what does not."""

from __future__ import annotations

import pytest

from prefixcache.errors import ConfigError
from proxy.engines.engine_url import EngineUrl
from proxy.engines.headers import Header, HeaderRules, read_header_names

IDENTITY = (b"accept-encoding", b"identity")
ENGINE = EngineUrl.parse("http://gpu-1:8000/base")


def response_headers(given: list[Header], *passed: str) -> list[Header]:
    return HeaderRules(passed=read_header_names(passed)).to_client(given, ENGINE)


def test_what_apps_send_reaches_the_engine_as_it_is() -> None:
    given = [
        (b"Content-Type", b"application/json"),
        (b"Accept", b"text/event-stream"),
        (b"User-Agent", b"OpenAI/Python 3.57"),
        (b"X-Request-ID", b"r1"),
        (b"X-Session-Id", b"s1"),
        (b"traceparent", b"00-1-2-01"),
        (b"OpenAI-Organization", b"org"),
        (b"anthropic-version", b"2023-06-01"),
        (b"anthropic-beta", b"a"),
        (b"anthropic-beta", b"b"),
        (b"X-data-parallel-rank", b"1"),
        (b"Authorization", b"Bearer sk-1"),
        (b"x-api-key", b"sk-2"),
    ]
    assert HeaderRules().to_engine(given) == [*given, IDENTITY]


@pytest.mark.parametrize(
    "name",
    b"Host Content-Length Transfer-Encoding Connection Keep-Alive TE Trailer Upgrade Expect Proxy-Authorization Cookie "
    b"Origin Referer X-Forwarded-For X-Forwarded-Host X-Real-Ip Forwarded Via Accept-Encoding Range If-None-Match "
    b"X-Stainless-Os X-Unknown openai".split(),
)
def test_what_does_not_reach_the_engine(name: bytes) -> None:
    for spelled in (name, name.lower(), name.upper()):
        assert HeaderRules().to_engine([(spelled, b"gzip")]) == [IDENTITY]


def test_credentials_stay_here_when_the_operator_says_so() -> None:
    given = [(b"AUTHORIZATION", b"Bearer sk-1"), (b"X-Api-Key", b"sk-2"), (b"Accept", b"*/*")]
    assert HeaderRules(forward_authorization=False).to_engine(given) == [(b"Accept", b"*/*"), IDENTITY]


def test_the_engines_own_key_stands_in_for_clients() -> None:
    rules = HeaderRules(engine_api_key="sk-engine")
    given = [(b"Authorization", b"Bearer sk-1"), (b"X-Api-Key", b"sk-2")]
    own = (b"authorization", b"Bearer sk-engine")
    assert rules.to_engine(given) == [IDENTITY, own]
    assert rules.own() == [own]
    assert HeaderRules().own() == []
    assert "sk-engine" not in repr(rules)


def test_what_connection_names_is_of_that_connection_alone() -> None:
    given = [(b"Connection", b"keep-alive, X-Request-Id"), (b"connection", b"Accept"), (b"X-REQUEST-ID", b"1")]
    assert HeaderRules().to_engine([*given, (b"accept", b"a"), (b"b3", b"0")]) == [(b"b3", b"0"), IDENTITY]
    assert response_headers([(b"Connection", b"Retry-After"), (b"retry-after", b"1"), (b"allow", b"GET")]) == [
        (b"allow", b"GET")
    ]


def test_what_engines_answer_reaches_the_client() -> None:
    given = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"Content-Length", b"12"),
        (b"Content-Encoding", b"gzip"),
        (b"Cache-Control", b"no-store"),
        (b"retry-after", b"3"),
        (b"WWW-Authenticate", b"Bearer"),
        (b"x-request-id", b"1"),
        (b"request-id", b"2"),
        (b"openai-processing-ms", b"12"),
        (b"x-ratelimit-remaining-requests", b"9"),
        (b"vary", b"accept"),
        (b"vary", b"origin"),
    ]
    assert response_headers(given) == given


@pytest.mark.parametrize(
    "name",
    b"Transfer-Encoding Connection Keep-Alive Trailer Upgrade Server Date Set-Cookie Alt-Svc "
    b"Access-Control-Allow-Origin Proxy-Authenticate Strict-Transport-Security X-Prefixcache-Worker X-Unknown".split(),
)
def test_what_of_an_answer_does_not_reach_the_client(name: bytes) -> None:
    assert response_headers([(name, b"x"), (name.lower(), b"x")]) == []


def test_a_place_that_an_answer_names_is_told_as_seen_from_outside() -> None:
    given = [(b"Location", b"http://gpu-1:8000/base/v1/files/f"), (b"content-location", b"/base/x")]
    assert response_headers(given) == [(b"Location", b"/v1/files/f"), (b"content-location", b"/x")]


def test_what_the_operator_names_passes_both_ways() -> None:
    given = [(b"X-Tenant", b"a"), (b"Cookie", b"b"), (b"X-Other", b"c")]
    rules = HeaderRules(passed=read_header_names(["x-tenant", "COOKIE"]))
    assert rules.to_engine(given) == [(b"X-Tenant", b"a"), (b"Cookie", b"b"), IDENTITY]
    assert response_headers(given, "X-TENANT") == [(b"X-Tenant", b"a")]
    named = [(b"connection", b"x-tenant"), *given]
    assert response_headers(named, "x-tenant") == [] and rules.to_engine(named) == [(b"Cookie", b"b"), IDENTITY]


@pytest.mark.parametrize(
    "name",
    [
        *"Host content-length Transfer-Encoding connection upgrade TE accept-encoding".split(),
        *"x-prefixcache-worker Access-Control-Allow-Origin X-A: X-A:b X-Ä".split(),
        "",
        "X A",
        "X-A\r\nX-B",
    ],
)
def test_a_name_that_never_passes(name: str) -> None:
    with pytest.raises(ConfigError):
        read_header_names([name])


def test_beside_the_key_of_the_engines_no_name_lets_those_of_clients_pass() -> None:
    rules = HeaderRules(
        engine_api_key="sk-engine", passed=read_header_names(["Authorization", "X-Api-Key", "X-Tenant"])
    )
    given = [(b"Authorization", b"Bearer sk-app"), (b"x-api-key", b"sk-app"), (b"X-Tenant", b"a")]
    assert rules.to_engine(given) == [(b"X-Tenant", b"a"), IDENTITY, (b"authorization", b"Bearer sk-engine")]
