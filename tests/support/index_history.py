"""One history of an index, told to two worlds at once: every answer must be the same in both.

    writers (caches) ── register, apply, renew, retire ──►  memory          a second proxy looks at the same store
    proxy one        ── match, commit, exchange_loads ───►  and the store   through connections of its own and must
    proxy two        ── the same                            under test      see exactly what the first one sees

Who plays it, hypothesis or a plain random source, chooses steps and arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefixcache.index.base import Commit
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
        self.version = 0

    async def begin(self) -> None:
        for writer in self.writers:
            await self.start_anew(writer)

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
        return {writer.ids[world.name]: writer.number for writer in self.writers}

    async def compare(self, chain: Sequence[int], asked: Sequence[Writer] = (), *, with_loads: bool = False) -> None:
        """Depths and pending claims are the same in all worlds, and nobody else is named; loads only if asked for."""
        found: list[object] = []
        for world in (self.memory, *self.proxies):
            numbers = self.numbers(world)
            match = await world.index.match(chain, candidates=[writer.ids[world.name] for writer in asked])
            loads = {numbers[incarnation]: load for incarnation, load in match.loads.items()} if with_loads else {}
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


def named(by_incarnation: Mapping[int, int], numbers: Mapping[int, int]) -> dict[int, int]:
    return {numbers[incarnation]: value for incarnation, value in by_incarnation.items()}


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
