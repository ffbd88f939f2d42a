"""One history of an index, told to two worlds at once: every answer must be the same in both.

    writers (caches) ── register, apply, renew, retire ──►  memory          a second proxy looks at the same store
    proxy one        ── match, commit, exchange_loads ───►  and the store   through connections of its own and must
    proxy two        ── the same                            under test      see exactly what the first one sees
    both proxies     ── open_family, families, claim

Who plays it, hypothesis or a plain random source, chooses steps and arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefixcache.index.base import Commit
from prefixcache.index.family import MOST_GENERATIONS, Family
from prefixcache.limits import MATCH_LOADS, MAX_APPLY_HASHES
from prefixcache.load import IncarnationLoad, ProxyLoad, WorkerLoad
from tests.support.index_commits import PROXY_ONE, PROXY_TWO, commit_of
from tests.support.index_forest import CHAINS, Cache
from tests.support.index_worlds import World

NEVER_GIVEN = 2**30 - 1
PROXY_IDS = (PROXY_ONE, PROXY_TWO)
Verb = Literal["place", "settle", "release"]
KEEPERS = ("keeper one", "keeper two")
TICK_S = 8.6
"""Time passes in ticks: no multiple is just below the end of an office (10 s), of a dead lease (30 s) or of a pending
claim (60 s), so that the milliseconds between the worlds decide nothing. What lives shorter ends within one tick."""
MOST_SWEEPS = 1_000
CAPACITIES = {"engine of 3": 3, "engine of 40": 40, "engine of 400": 400}
"""Index blocks of plain engines: less than a prompt, a few prompts, and many."""
ENGINES = tuple(CAPACITIES)


@dataclass(slots=True)
class Writer:
    """One writer as both worlds know it."""

    number: int
    ids: dict[str, int] = field(default_factory=dict)
    """Its present incarnation in each world, by the world's name."""
    batch: int = 0
    cache: Cache = field(default_factory=Cache)
    last_batch: tuple[list[int], list[int]] = ([], [])


class History:
    """`proxies`: the store under test, seen through two sets of connections."""

    def __init__(self, memory: World, proxies: tuple[World, World], num_writers: int) -> None:
        self.memory = memory
        self.proxies = proxies
        self.writers = [Writer(number) for number in range(num_writers)]
        self.families: dict[str, dict[str, Family]] = {memory.name: {}, proxies[0].name: {}}
        """Of each engine in each world, as the last answer said."""
        self.version = 0

    async def begin(self) -> None:
        for writer in self.writers:
            await self.start_anew(writer)
        for engine in ENGINES:
            await self.open_family(engine, 0)

    async def end(self) -> None:
        """Everything is announced and swept: both worlds are intact and alike on every chain."""
        for writer in self.writers:
            await self.publish(writer)
        for chain in CHAINS:
            await self.compare(chain)
        await self.sweep(0)
        for world in (self.memory, *self.proxies):
            claims = {writer.ids[world.name]: len(writer.cache.claimed) for writer in self.writers}
            await world.index.check_integrity(claims)

    # --- what both worlds are told and asked

    def own_world(self, writer: Writer) -> World:
        """Each writer has its own process, and so writes through one set of connections."""
        return self.proxies[writer.number % len(self.proxies)]

    def numbers(self, world: World) -> dict[int, int]:
        """Writers by their number, engines by one below zero."""
        numbers = {writer.ids[world.name]: writer.number for writer in self.writers}
        for engine, family in self.families[world.name].items():
            numbers |= dict.fromkeys((family.anchor, *family.generations), number_of(engine))
        return numbers

    def anchor(self, engine: str) -> Writer:
        """As far as loads and pending claims are concerned."""
        ids = {name: families[engine].anchor for name, families in self.families.items()}
        return Writer(number=number_of(engine), ids=ids)

    async def compare(self, chain: Sequence[int], asked: Sequence[Writer] = (), *, with_loads: bool = False) -> None:
        """Depths and pending claims are the same in all worlds, and nobody else is named; loads only if asked for.

        Which generations of an engine are named besides the deepest one is left open, and with it whose load comes
        unasked.
        """
        found: list[object] = []
        of_asked = {writer.number for writer in asked}
        has_claims = any(family.num_claims for family in self.families[self.memory.name].values())
        for world in (self.memory, *self.proxies):
            numbers = self.numbers(world)
            match = await world.index.match(chain, candidates=[writer.ids[world.name] for writer in asked])
            named_loads = {numbers[incarnation]: load for incarnation, load in match.loads.items()}
            if not with_loads:
                named_loads.clear()
            loads = {number: load for number, load in named_loads.items() if number in of_asked or not has_claims}
            found.append((named(match.depths, numbers), named(match.pending, numbers), loads))
        assert found[0] == found[1] == found[2]

    async def apply(self, writer: Writer, batch: int, stored: Sequence[int], removed: Sequence[int]) -> str:
        """The status that both worlds answer."""
        answers = [
            await world.index.apply(writer.ids[world.name], batch, stored, removed)
            for world in (self.memory, self.own_world(writer))
        ]
        assert answers[0].status == answers[1].status
        return answers[0].status

    async def publish(self, writer: Writer, most: int = MAX_APPLY_HASHES, batches: int = 1_000) -> None:
        """Announces what is unsent, `most` steps of the cache a batch."""
        while writer.cache.unsent and batches:
            writer.last_batch = writer.cache.next_batch(most)
            writer.batch += 1
            batches -= 1
            assert await self.apply(writer, writer.batch, *writer.last_batch) == "ok"

    async def start_anew(self, writer: Writer) -> None:
        """A new incarnation that has announced nothing yet of what its cache holds."""
        for world in (self.memory, self.own_world(writer)):
            registration = await world.index.register()
            assert registration.incarnation > writer.ids.get(world.name, 0)
            writer.ids[world.name] = registration.incarnation
        held = writer.cache.held
        writer.batch, writer.cache = 0, Cache()
        for chain in CHAINS:
            writer.cache.store([block for block in chain if block in held])

    async def check_dead(self, writer: Writer) -> None:
        for world in (self.memory, self.own_world(writer)):
            assert not await world.index.renew(writer.ids[world.name])
        assert await self.apply(writer, writer.batch + 1, CHAINS[1][:2], []) == "dead"

    # --- steps of a cache and its publisher

    async def store(self, writer: Writer, chain: list[int], most: int, batches: int) -> None:
        writer.cache.store(chain)
        await self.publish(writer, most, batches)
        await self.compare(chain)

    async def evict(self, writer: Writer, chain: list[int], depth: int, most: int, batches: int) -> None:
        """The block at that depth and all below it, in every branch."""
        if chain:
            writer.cache.evict(chain[min(depth, len(chain) - 1)])
        await self.publish(writer, most, batches)
        await self.compare(chain)

    async def all_do_the_same(self, count: int, chain: list[int], *, is_held: bool) -> None:
        """Lists of holders grow past 12 and shrink below 8."""
        for writer in self.writers[:count]:
            if is_held:
                writer.cache.store(chain[:3])
            elif chain:
                writer.cache.evict(chain[min(2, len(chain) - 1)])
            await self.publish(writer)
        await self.compare(chain)

    async def resend(self, writer: Writer, back: int, chain: list[int]) -> None:
        """A batch that comes twice, or after its successors, changes nothing."""
        if writer.batch > back:
            stored, removed = writer.last_batch if back == 0 else (chain[:3], chain[3:6])
            assert await self.apply(writer, writer.batch - back, stored, removed) == "old"
            await self.compare(chain)

    async def skip_a_batch(self, writer: Writer, ahead: int, chain: list[int]) -> None:
        assert await self.apply(writer, writer.batch + ahead, chain[:3], chain[3:6]) == "gap"
        await self.compare(chain)

    async def write_as_nobody(self, chain: list[int]) -> None:
        names = (self.memory.name, self.proxies[0].name)
        await self.check_dead(Writer(number=0, ids=dict.fromkeys(names, NEVER_GIVEN)))
        await self.compare(chain)

    # --- steps of leases and stores

    async def lapse(self, writer: Writer, chain: list[int]) -> None:
        for world in (self.memory, self.proxies[0]):
            world.expire(writer.ids[world.name])
        await self.compare(chain)

    async def renew(self, writer: Writer, chain: list[int]) -> None:
        for world in (self.memory, self.own_world(writer)):
            assert await world.index.renew(writer.ids[world.name])
        await self.compare(chain)

    async def restart(self, writer: Writer, chain: list[int]) -> None:
        for world in (self.memory, self.own_world(writer)):
            await world.index.retire(writer.ids[world.name])
        await self.check_dead(writer)
        await self.start_anew(writer)
        await self.compare(chain)

    async def flush(self, chain: list[int]) -> None:
        for world in (self.memory, self.proxies[0]):
            world.flush()
        for writer in self.writers:
            await self.check_dead(writer)
        for writer in self.writers:
            await self.start_anew(writer)
        for engine in ENGINES:
            await self.check_families(absent=ENGINES[ENGINES.index(engine) :])
            await self.open_family(engine, 0)
        await self.compare(chain)

    async def let_pass(self, ticks: int) -> None:
        for world in (self.memory, self.proxies[0]):
            world.let_pass(ticks * TICK_S)

    async def sweep(self, keeper: int) -> None:
        """To its end: the same incarnations die; who died takes a new incarnation."""
        expected = await self.memory.index.sweep(KEEPERS[keeper])
        index = self.proxies[keeper].index
        answer = await index.sweep(KEEPERS[keeper])
        assert answer.dead_incarnations == expected.dead_incarnations
        assert (answer.status == "other") == (expected.status == "other")
        for _ in range(MOST_SWEEPS):
            if answer.status != "more":
                break
            answer = await index.sweep(KEEPERS[keeper])
            assert answer.dead_incarnations == 0
        assert answer.status != "more"
        for writer in self.writers:
            if await self.apply(writer, 0, [], []) == "dead":
                await self.start_anew(writer)
        for engine in await self.check_families():
            await self.open_family(engine, keeper)

    # --- steps of proxies for plain engines

    async def open_family(self, engine: str, proxy: int, *, instead_of: Mapping[str, int | None] | None = None) -> None:
        """`instead_of`: by the world's name."""
        for world in (self.memory, self.proxies[proxy]):
            replaced = (instead_of or {}).get(world.name)
            self.families[world.name][engine] = await world.index.open_family(engine, instead_of=replaced)
        self.check_alike(engine)

    async def check_families(self, renew: Sequence[str] = (), absent: Sequence[str] = ()) -> Sequence[str]:
        """Those that stand are as they were answered last; returns those that do not."""
        gone: list[list[str]] = []
        for world in (self.memory, *self.proxies):
            found = await world.index.families(ENGINES, renew=renew)
            gone.append([engine for engine in ENGINES if engine not in found])
            assert all(found[engine] == self.families[world.name][engine] for engine in found)
        assert gone[0] == gone[1] == gone[2]
        assert set(absent) <= set(gone[0])
        return gone[0]

    def check_alike(self, engine: str) -> None:
        mine, real = (families[engine] for families in self.families.values())
        assert (mine.num_claims, len(mine.generations)) == (real.num_claims, len(real.generations))
        assert 2 <= len(mine.generations) <= 1 + MOST_GENERATIONS

    async def claim(self, engine: str, chain: list[int], proxy: int) -> None:
        """As a proxy does: the deep end of a long chain first, in pieces."""
        first = (len(chain) - 1) // MAX_APPLY_HASHES * MAX_APPLY_HASHES
        for start in range(max(first, 0), -1, -MAX_APPLY_HASHES):
            piece = chain[start : start + MAX_APPLY_HASHES]
            for world in (self.memory, self.proxies[proxy]):
                anchor = self.families[world.name][engine].anchor
                family = await world.index.claim(engine, anchor, piece, capacity=CAPACITIES[engine])
                assert family is not None
                self.families[world.name][engine] = family
            self.check_alike(engine)
        await self.compare(chain)

    async def claim_for_another_family(self, engine: str, chain: list[int], proxy: int) -> None:
        for world in (self.memory, self.proxies[proxy]):
            piece = chain[:MAX_APPLY_HASHES]
            assert await world.index.claim(engine, NEVER_GIVEN, piece, capacity=CAPACITIES[engine]) is None
        await self.compare(chain)

    async def begin_anew(self, engine: str, chain: list[int], proxies: Sequence[int]) -> None:
        """Each of the proxies saw that the engine lost its cache: the first one begins, others get what it began."""
        before = {name: families[engine].anchor for name, families in self.families.items()}
        for proxy in proxies:
            await self.open_family(engine, proxy, instead_of=before)
        mine, real = (families[engine] for families in self.families.values())
        assert mine.num_claims == real.num_claims == 0
        await self.check_dead(Writer(number=0, ids=before))
        await self.compare(chain)

    async def renew_engines(self, engines: Sequence[str], chain: list[int]) -> None:
        for engine in await self.check_families(renew=engines):
            await self.open_family(engine, 0)
        await self.compare(chain)

    async def lapse_engine(self, engine: str, chain: list[int]) -> None:
        for world in (self.memory, self.proxies[0]):
            family = self.families[world.name][engine]
            for incarnation in (family.anchor, *family.generations):
                world.expire(incarnation)
        await self.compare(chain)

    # --- steps of proxies

    async def commit(self, verb: Verb, request: int, writer: Writer, chain: list[int], proxy: int) -> None:
        await self._commit(verb, request, writer, chain, proxy)
        await self.compare(chain)
        if verb == "settle":
            await self.let_pass(1)
            await self.compare(chain)

    async def _commit(self, verb: Verb, request: int, writer: Writer, chain: list[int], proxy: int) -> None:
        self.version += 1
        answers: list[Mapping[int, int]] = []
        for world in (self.memory, self.proxies[proxy]):
            commit: Commit = commit_of(
                verb,
                request,
                chain,
                writer.ids[world.name],
                proxy_id=PROXY_IDS[proxy],
                load=ProxyLoad(version=self.version, running=request),
            )
            answers.append(named(await world.index.commit(commit), self.numbers(world)))
        assert answers[0] == answers[1]

    async def exchange_loads(self, told: Sequence[tuple[int, Writer, int]], chain: list[int]) -> None:
        """`told`: who writes (a proxy, or the worker itself for 2), about whom, how far its version is ahead or behind.

        Older records end first, so that none does while the worlds are compared.
        """
        await self.let_pass(1)
        for who, writer, ahead in told:
            self.version += 1
            version = max(self.version + ahead, 0)
            if who < len(PROXY_IDS):
                await self._exchange(who, {writer.number: ProxyLoad(version=version, running=self.version)})
            else:
                load = worker_load(version, available_blocks=self.version)
                for world in (self.memory, self.own_world(writer)):
                    assert await world.index.renew(writer.ids[world.name], load)
        await self._exchange(0, {})
        await self.compare(chain, [writer for _, writer, _ in told][:MATCH_LOADS], with_loads=True)

    async def _exchange(self, proxy: int, own: Mapping[int, ProxyLoad]) -> None:
        """Writes loads by the number of the writer, and compares those of all."""
        found: list[dict[int, IncarnationLoad]] = []
        for world in (self.memory, self.proxies[proxy]):
            numbers = self.numbers(world)
            loads = await world.index.exchange_loads(
                PROXY_IDS[proxy],
                {self.writers[number].ids[world.name]: load for number, load in own.items()},
                list(numbers),
            )
            found.append({numbers[incarnation]: load for incarnation, load in loads.items()})
        assert found[0] == found[1]


def number_of(engine: str) -> int:
    return -1 - ENGINES.index(engine)


def named(depths: Mapping[int, int], numbers: Mapping[int, int]) -> dict[int, int]:
    """Of an engine the deepest of its incarnations counts."""
    deepest: dict[int, int] = {}
    for incarnation, depth in depths.items():
        deepest[numbers[incarnation]] = max(depth, deepest.get(numbers[incarnation], 0))
    return deepest


def worker_load(version: int, available_blocks: int) -> WorkerLoad:
    """Without a time that counts down."""
    return WorkerLoad(
        version=version,
        rest_s=0.0,
        prefill_rate=4_096.0,
        inter_token_latency_s=0.25,
        available_blocks=available_blocks,
        oldest_age_s=2.0,
    )
