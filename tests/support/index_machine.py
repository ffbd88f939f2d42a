"""Random histories of an index in two worlds at once, made by hypothesis, which shrinks one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from prefixcache.limits import MAX_APPLY_HASHES
from tests.support.index_forest import CHAINS
from tests.support.index_history import ENGINES, KEEPERS, PROXY_IDS, History, Verb, Writer
from tests.support.index_worlds import World
from tests.support.seeds import seeded

Result = TypeVar("Result")

STEPS = 30

CHAIN_NUMBERS = st.integers(0, len(CHAINS) - 1)
PIECES = st.tuples(CHAIN_NUMBERS, st.integers(0, 2**10))
"""A chain, and how many of its first blocks."""
WRITERS = st.integers(0, 2**16)
"""Taken modulo the number of writers."""
CUTS = st.integers(1, MAX_APPLY_HASHES)
"""Steps of a cache that one batch carries."""
ENGINE_NAMES = st.sampled_from(ENGINES)
PROXIES = st.integers(0, len(PROXY_IDS) - 1)
BATCHES = st.integers(0, 5)
"""Sent of what is unsent; the rest waits."""


Piece = tuple[int, int]


def blocks_of(piece: Piece) -> list[int]:
    number, depth = piece
    return CHAINS[number][:depth]


class IndexMachine(RuleBasedStateMachine):
    """A subclass says which worlds; `num_writers` incarnations are alive at a time."""

    num_writers = 8

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()  # asyncio.Runner would take over SIGINT anew with each of many short calls
        self.history = History(*self.open_worlds(), self.num_writers)

    def open_worlds(self) -> tuple[World, tuple[World, World]]:
        """An empty one in memory, and an empty store seen through two sets of connections."""
        raise NotImplementedError

    def close_worlds(self) -> None:
        """Gives back what open_worlds took."""

    def teardown(self) -> None:
        try:
            self.run(self.history.end())
        finally:
            self.close_worlds()
            self.loop.close()

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(call)

    def writer(self, number: int) -> Writer:
        return self.history.writers[number % self.num_writers]

    @initialize()
    def begin(self) -> None:
        self.run(self.history.begin())

    @rule(number=WRITERS, piece=PIECES, most=CUTS, batches=BATCHES)
    def store(self, number: int, piece: Piece, most: int, batches: int) -> None:
        self.run(self.history.store(self.writer(number), blocks_of(piece), most, batches))

    @rule(number=WRITERS, root=st.integers(0, 3))
    def store_all_of_a_root(self, number: int, root: int) -> None:
        """So many new blocks that buckets are divided."""
        per_root = len(CHAINS) // 4
        for chain in CHAINS[root * per_root : (root + 1) * per_root]:
            self.run(self.history.store(self.writer(number), chain, MAX_APPLY_HASHES, 10))

    @rule(number=WRITERS, chain=CHAIN_NUMBERS, depth=st.integers(0, 2**8), most=CUTS, batches=BATCHES)
    def evict(self, number: int, chain: int, depth: int, most: int, batches: int) -> None:
        self.run(self.history.evict(self.writer(number), CHAINS[chain], depth, most, batches))

    @rule(count=st.integers(1, 2**6), chain=CHAIN_NUMBERS, is_held=st.booleans())
    def all_do_the_same(self, count: int, chain: int, is_held: bool) -> None:
        self.run(self.history.all_do_the_same(count, CHAINS[chain], is_held=is_held))

    @rule(number=WRITERS, back=st.integers(0, 5), piece=PIECES)
    def resend(self, number: int, back: int, piece: Piece) -> None:
        self.run(self.history.resend(self.writer(number), back, blocks_of(piece)))

    @rule(number=WRITERS, ahead=st.integers(2, 5), piece=PIECES)
    def skip_a_batch(self, number: int, ahead: int, piece: Piece) -> None:
        self.run(self.history.skip_a_batch(self.writer(number), ahead, blocks_of(piece)))

    @rule(piece=PIECES)
    def write_as_nobody(self, piece: Piece) -> None:
        self.run(self.history.write_as_nobody(blocks_of(piece)))

    @rule(number=WRITERS, piece=PIECES)
    def lapse(self, number: int, piece: Piece) -> None:
        self.run(self.history.lapse(self.writer(number), blocks_of(piece)))

    @rule(number=WRITERS, piece=PIECES)
    def renew(self, number: int, piece: Piece) -> None:
        self.run(self.history.renew(self.writer(number), blocks_of(piece)))

    @rule(number=WRITERS, piece=PIECES)
    def restart(self, number: int, piece: Piece) -> None:
        self.run(self.history.restart(self.writer(number), blocks_of(piece)))

    @rule(piece=PIECES)
    def flush(self, piece: Piece) -> None:
        self.run(self.history.flush(blocks_of(piece)))

    @rule(ticks=st.integers(1, 4))
    def let_pass(self, ticks: int) -> None:
        self.run(self.history.let_pass(ticks))

    @rule(keeper=st.integers(0, len(KEEPERS) - 1))
    def sweep(self, keeper: int) -> None:
        self.run(self.history.sweep(keeper))

    @rule(
        verb=st.sampled_from(("place", "place", "settle", "release")),
        request=st.integers(0, 5),
        number=WRITERS,
        piece=PIECES,
        proxy=PROXIES,
    )
    def commit(self, verb: Verb, request: int, number: int, piece: Piece, proxy: int) -> None:
        self.run(self.history.commit(verb, request, self.writer(number), blocks_of(piece), proxy))

    @rule(
        verb=st.sampled_from(("place", "settle", "release")),
        request=st.integers(0, 5),
        engine=ENGINE_NAMES,
        piece=PIECES,
        proxy=PROXIES,
    )
    def commit_to_engine(self, verb: Verb, request: int, engine: str, piece: Piece, proxy: int) -> None:
        self.run(self.history.commit(verb, request, self.history.anchor(engine), blocks_of(piece), proxy))

    @rule(engine=ENGINE_NAMES, pieces=st.lists(PIECES, min_size=1, max_size=4), proxy=PROXIES)
    def claim(self, engine: str, pieces: list[Piece], proxy: int) -> None:
        for piece in pieces:
            self.run(self.history.claim(engine, blocks_of(piece), proxy))

    @rule(piece=PIECES, proxy=PROXIES)
    def claim_of_all_engines(self, piece: Piece, proxy: int) -> None:
        for engine in ENGINES:
            self.run(self.history.claim(engine, blocks_of(piece), proxy))

    @rule(engine=ENGINE_NAMES, piece=PIECES, proxy=PROXIES)
    def claim_for_another_family(self, engine: str, piece: Piece, proxy: int) -> None:
        self.run(self.history.claim_for_another_family(engine, blocks_of(piece), proxy))

    @rule(engine=ENGINE_NAMES, piece=PIECES, proxies=st.lists(PROXIES, min_size=1, max_size=3))
    def begin_engine_anew(self, engine: str, piece: Piece, proxies: list[int]) -> None:
        self.run(self.history.begin_anew(engine, blocks_of(piece), proxies))

    @rule(engines=st.lists(ENGINE_NAMES, unique=True), piece=PIECES)
    def renew_engines(self, engines: list[str], piece: Piece) -> None:
        self.run(self.history.renew_engines(engines, blocks_of(piece)))

    @rule(engine=ENGINE_NAMES, piece=PIECES)
    def lapse_engine(self, engine: str, piece: Piece) -> None:
        self.run(self.history.lapse_engine(engine, blocks_of(piece)))

    @rule(
        told=st.lists(st.tuples(st.integers(0, len(PROXY_IDS)), WRITERS, st.integers(-3, 3)), min_size=1, max_size=12),
        piece=PIECES,
    )
    def exchange_loads(self, told: list[tuple[int, int, int]], piece: Piece) -> None:
        self.run(
            self.history.exchange_loads(
                [(who, self.writer(number), ahead) for who, number, ahead in told], blocks_of(piece)
            )
        )


def run_machine(machine: type[IndexMachine], what: str) -> None:
    """Tries as many histories as the hypothesis profile says, from a printed seed."""
    seed(seeded(what).getrandbits(32))(machine)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=STEPS, database=None))
