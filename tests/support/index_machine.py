"""Random histories of an index in two worlds at once, made by hypothesis: every answer must be the same in both.

Writers announce prefixes of forked chains, resend, skip and come late, lose their lease and get it back, start anew;
the store is emptied. At the end both worlds are intact and match alike on every chain.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from prefixcache.limits import MAX_APPLY_HASHES
from tests.support.index_worlds import World
from tests.support.seeds import seeded

Result = TypeVar("Result")

NUM_ROOTS, NUM_BRANCHES = 4, 6
TRUNK_BLOCKS, BRANCH_BLOCKS = 40, 120
NEVER_GIVEN = 2**30 - 1
STEPS = 30

_rand = random.Random("blocks")
_AWKWARD = [0, 1, 2**64 - 1, 1 << 56, 2 << 56, (1 << 56) + 1, 0xFFFFFFFF, 0xFFFFFFFF << 32]
"""Smallest and largest, alike in all bytes but the first, and alike the marker of a long list of holders."""
TRUNKS = [[_rand.getrandbits(64) for _ in range(TRUNK_BLOCKS)] for _ in range(NUM_ROOTS)]
TRUNKS[0][: len(_AWKWARD)] = _AWKWARD
BRANCHES = [
    [[_rand.getrandbits(64) for _ in range(BRANCH_BLOCKS)] for _ in range(NUM_BRANCHES)] for _ in range(NUM_ROOTS)
]


def chain_of(root: int, trunk: int, branch: int, length: int) -> list[int]:
    """The first blocks of a trunk, then the first blocks of one of its branches."""
    return TRUNKS[root][:trunk] + BRANCHES[root][branch][:length]


CHAINS = st.builds(
    chain_of,
    st.integers(0, NUM_ROOTS - 1),
    st.integers(0, TRUNK_BLOCKS),
    st.integers(0, NUM_BRANCHES - 1),
    st.integers(0, BRANCH_BLOCKS),
)
WRITERS = st.integers(0, 2**16)
"""Taken modulo the number of writers."""


@dataclass(slots=True)
class Writer:
    """One writer as both worlds know it."""

    ids: dict[str, int] = field(default_factory=dict)
    """Its present incarnation in each world, by the world's name."""
    batch: int = 0


class IndexMachine(RuleBasedStateMachine):
    """A subclass says which worlds; `num_writers` incarnations are alive at a time."""

    num_writers = 8

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()  # asyncio.Runner would take over SIGINT anew with each of many short calls
        self.worlds = self.open_worlds()
        self.writers = [Writer() for _ in range(self.num_writers)]

    def open_worlds(self) -> tuple[World, World]:
        """Two empty worlds."""
        raise NotImplementedError

    def close_worlds(self) -> None:
        """Gives back what open_worlds took."""

    def teardown(self) -> None:
        try:
            for trunk, branches in zip(TRUNKS, BRANCHES, strict=True):
                for branch in branches:
                    self.compare(trunk + branch)
            for world in self.worlds:
                self.run(world.index.check_integrity())
        finally:
            self.close_worlds()
            self.loop.close()

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(call)

    # --- what both worlds are told and asked

    def compare(self, chain: Sequence[int]) -> None:
        """Each live writer reaches as deep in one world as in the other, and nobody else is named."""
        found: list[dict[int, int]] = []
        for world in self.worlds:
            numbers = {writer.ids[world.name]: number for number, writer in enumerate(self.writers)}
            match = self.run(world.index.match(chain))
            found.append({numbers[incarnation]: depth for incarnation, depth in match.items()})
        assert found[0] == found[1]

    def apply(self, writer: Writer, batch: int, stored: Sequence[int], removed: Sequence[int]) -> str:
        """The status that both worlds answer."""
        answers = [self.run(world.index.apply(writer.ids[world.name], batch, stored, removed)) for world in self.worlds]
        assert answers[0].status == answers[1].status
        return answers[0].status

    def announce(self, writer: Writer, stored: Sequence[int], removed: Sequence[int]) -> None:
        """In as many batches as it takes, removals last."""
        changes = [(block, True) for block in stored] + [(block, False) for block in removed]
        for start in range(0, len(changes), MAX_APPLY_HASHES):
            some = changes[start : start + MAX_APPLY_HASHES]
            writer.batch += 1
            adds, removes = [block for block, held in some if held], [block for block, held in some if not held]
            assert self.apply(writer, writer.batch, adds, removes) == "ok"

    def start_anew(self, writer: Writer) -> None:
        for world in self.worlds:
            registration = self.run(world.index.register())
            assert registration.incarnation > writer.ids.get(world.name, 0)
            writer.ids[world.name] = registration.incarnation
        writer.batch = 0

    def is_dead(self, writer: Writer) -> None:
        for world in self.worlds:
            assert not self.run(world.index.renew(writer.ids[world.name]))
        assert self.apply(writer, writer.batch + 1, TRUNKS[1][:2], []) == "dead"

    def writer(self, number: int) -> Writer:
        return self.writers[number % self.num_writers]

    # --- steps

    @initialize()
    def register_all(self) -> None:
        for writer in self.writers:
            self.start_anew(writer)

    @rule(number=WRITERS, chain=CHAINS)
    def hold(self, number: int, chain: list[int]) -> None:
        self.announce(self.writer(number), chain, [])
        self.compare(chain)

    @rule(number=WRITERS, chain=CHAINS, depth=st.integers(0, TRUNK_BLOCKS + BRANCH_BLOCKS))
    def evict_leaves(self, number: int, chain: list[int], depth: int) -> None:
        self.announce(self.writer(number), [], chain[depth:])
        self.compare(chain)

    @rule(number=WRITERS, added=CHAINS, gone=CHAINS)
    def change(self, number: int, added: list[int], gone: list[int]) -> None:
        """Blocks that stand in both end up removed."""
        self.announce(self.writer(number), added, gone)
        self.compare(added)
        self.compare(gone)

    @rule(number=WRITERS, root=st.integers(0, NUM_ROOTS - 1))
    def hold_all_of_a_root(self, number: int, root: int) -> None:
        """So many new blocks that buckets are divided."""
        blocks = TRUNKS[root] + [block for branch in BRANCHES[root] for block in branch]
        self.announce(self.writer(number), blocks, [])
        self.compare(TRUNKS[root] + BRANCHES[root][-1])

    @rule(count=st.integers(1, 2**6), chain=CHAINS, holds=st.booleans())
    def many_do_the_same(self, count: int, chain: list[int], holds: bool) -> None:
        """Lists of holders grow past 12 and shrink below 8."""
        for writer in self.writers[:count]:
            self.announce(writer, chain[:3] if holds else [], [] if holds else chain[:3])
        self.compare(chain)

    @rule(number=WRITERS, back=st.integers(0, 5), chain=CHAINS)
    def resend(self, number: int, back: int, chain: list[int]) -> None:
        """A batch that comes late or twice changes nothing."""
        writer = self.writer(number)
        if writer.batch > back:
            assert self.apply(writer, writer.batch - back, chain[:3], chain[3:6]) == "old"
            self.compare(chain)

    @rule(number=WRITERS, ahead=st.integers(2, 5), chain=CHAINS)
    def skip_a_batch(self, number: int, ahead: int, chain: list[int]) -> None:
        writer = self.writer(number)
        assert self.apply(writer, writer.batch + ahead, chain[:3], chain[3:6]) == "gap"
        self.compare(chain)

    @rule(chain=CHAINS)
    def write_as_nobody(self, chain: list[int]) -> None:
        nobody = Writer(ids={world.name: NEVER_GIVEN for world in self.worlds})
        self.is_dead(nobody)
        self.compare(chain)

    @rule(number=WRITERS, chain=CHAINS)
    def lapse(self, number: int, chain: list[int]) -> None:
        for world in self.worlds:
            world.expire(self.writer(number).ids[world.name])
        self.compare(chain)

    @rule(number=WRITERS, chain=CHAINS)
    def renew(self, number: int, chain: list[int]) -> None:
        for world in self.worlds:
            assert self.run(world.index.renew(self.writer(number).ids[world.name]))
        self.compare(chain)

    @rule(number=WRITERS, chain=CHAINS)
    def restart(self, number: int, chain: list[int]) -> None:
        writer = self.writer(number)
        for world in self.worlds:
            self.run(world.index.retire(writer.ids[world.name]))
        self.is_dead(writer)
        self.start_anew(writer)
        self.compare(chain)

    @rule(chain=CHAINS)
    def flush(self, chain: list[int]) -> None:
        for world in self.worlds:
            world.flush()
        for writer in self.writers:
            self.is_dead(writer)
        for writer in self.writers:
            self.start_anew(writer)
        self.compare(chain)


def run_machine(machine: type[IndexMachine], what: str) -> None:
    """Tries as many histories as the hypothesis profile says, from a printed seed."""
    seed(seeded(what).getrandbits(32))(machine)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=STEPS, database=None))
