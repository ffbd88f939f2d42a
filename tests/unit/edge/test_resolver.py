"""Names and what they mean, while the name server answers, is slow, or fails."""

from __future__ import annotations

import asyncio

import pytest

from edge.address import Address
from edge.config import Name
from edge.resolver import Resolver, look_up

PROXY, OTHER = Name(host="proxy", port=8000), Name(host="other", port=9000)
ONE, TWO = Address("10.0.0.1", 8000), Address("10.0.0.2", 8000)


class NameServer:
    """Answers what a test puts there; without an answer it waits for one."""

    def __init__(self) -> None:
        self.answers: dict[Name, frozenset[Address] | Exception] = {}
        self.news = asyncio.Event()
        self.num_asked = 0

    async def look_up(self, name: Name) -> frozenset[Address]:
        self.num_asked += 1
        while name not in self.answers:
            await self.news.wait()
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_all_addresses_of_all_names() -> None:
    server = NameServer()
    server.answers = {PROXY: frozenset({ONE, TWO}), OTHER: frozenset({Address("10.0.0.9", 9000)})}
    resolver = Resolver([PROXY, OTHER], server.look_up)
    assert await resolver.addresses(timeout_s=5) == {ONE, TWO, Address("10.0.0.9", 9000)}
    server.answers[PROXY] = frozenset({TWO})
    assert await resolver.addresses(timeout_s=5) == {TWO, Address("10.0.0.9", 9000)}


async def test_a_name_server_that_fails_changes_nothing() -> None:
    server = NameServer()
    resolver = Resolver([PROXY], server.look_up)
    server.answers[PROXY] = OSError("not known")
    assert await resolver.addresses(timeout_s=5) == frozenset()
    server.answers[PROXY] = frozenset({ONE})
    assert await resolver.addresses(timeout_s=5) == {ONE}
    server.answers[PROXY] = OSError("try again")
    assert await resolver.addresses(timeout_s=5) == {ONE}


async def test_a_slow_one_is_waited_for_in_the_background_and_asked_once() -> None:
    server = NameServer()
    server.answers[OTHER] = frozenset({ONE})
    resolver = Resolver([PROXY, OTHER], server.look_up)
    assert await resolver.addresses(timeout_s=0.01) == {ONE}
    assert await resolver.addresses(timeout_s=0.01) == {ONE}
    assert server.num_asked == 3, "the slow question once, the other one twice"
    server.answers[PROXY] = frozenset({TWO})
    server.news.set()
    assert await resolver.addresses(timeout_s=5) == {ONE, TWO}
    await resolver.close()


async def test_a_mistake_is_not_taken_for_a_failing_server() -> None:
    server = NameServer()
    server.answers[PROXY] = KeyError("a bug")
    with pytest.raises(KeyError):
        await Resolver([PROXY], server.look_up).addresses(timeout_s=5)


async def test_a_proxy_with_addresses_of_both_kinds_counts_once() -> None:
    assert await look_up(Name(host="localhost", port=7)) == {Address("127.0.0.1", 7)}
    assert await look_up(Name(host="::1", port=7)) == {Address("::1", 7)}
    assert str(Address("::1", 7)) == "[::1]:7"
