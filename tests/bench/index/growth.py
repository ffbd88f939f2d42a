"""An index that grows over some powers of ten: what a call costs at each size, and its worst call on the way.

The same calls on an index that stays as small as the first size are interleaved, so that a ratio compares one minute
with itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

from prefixcache.index.keys import NamespaceKeys
from prefixcache.index.redis_index import RedisIndex
from prefixcache.limits import MAX_APPLY_HASHES
from tests.bench.index.bench import Bench, CallCosts, Writer, call_costs, percentile, spread
from tests.bench.index.memory import MOST_FIELDS
from tests.bench.index.tree_shapes import new_hashes
from tests.bench.report import Floor, Table

WORKERS = 8
CHAIN_BLOCKS = 128
MOST_CHAINS = 300
STEADY_CALLS = 40
GROWING_CALLS = 64
"""Right after a size is reached; at 10,000 blocks the first bucket is divided among them."""
LOOKS_A_ROUND = 32
"""How often the shape of the buckets is looked at while their number doubles."""
FULLEST = 0.93
"""Share of the buckets divided in a round at which those left are fullest, for how many they are."""
MOST_RATIO = 2.0


@dataclass(slots=True)
class Grown:
    """An index, who writes it, and chains all over it."""

    keys: NamespaceKeys
    index: RedisIndex
    writers: Sequence[Writer]
    num_blocks: int = 0
    chains: list[array[int]] = field(default_factory=list)
    next_writer: Iterator[Writer] = field(init=False)

    def __post_init__(self) -> None:
        self.next_writer = cycle(self.writers)

    @classmethod
    async def open(cls, bench: Bench) -> Grown:
        keys = bench.new_keys()
        index = bench.index(keys)
        return cls(keys, index, [await Writer.register(index) for _ in range(WORKERS)])

    def apply_calls(self, bench: Bench, count: int) -> Iterator[Callable[[], Awaitable[object]]]:
        """Batches of new blocks; the first half of some, evenly drawn, is a chain that a match may ask for."""
        for _ in range(count):
            batch = new_hashes(bench.random, MAX_APPLY_HASHES)
            self.num_blocks += len(batch)
            if len(self.chains) < MOST_CHAINS:
                self.chains.append(batch[:CHAIN_BLOCKS])
            elif bench.random.random() < MOST_CHAINS * MAX_APPLY_HASHES / self.num_blocks:
                self.chains[bench.random.randrange(MOST_CHAINS)] = batch[:CHAIN_BLOCKS]
            yield partial(next(self.next_writer).apply, batch)


async def measure_growth(bench: Bench) -> tuple[Table, list[Floor]]:
    bench.server.flush()
    small, large = await Grown.open(bench), await Grown.open(bench)
    first = bench.sizes.growth[0]
    await call_costs(bench.server, small.apply_calls(bench, first // MAX_APPLY_HASHES))
    rows: list[dict[str, object]] = []
    growing_ms: list[float] = []
    largest = 0
    for size in bench.sizes.growth:
        on_the_way, fields = await _grow(bench, large, size)
        reached, used_bytes = large.num_blocks, bench.server.used_memory_bytes()
        fields = max(fields, bench.server.largest_hash())
        largest = max(largest, fields)
        match_ms, match_ratios = await _interleaved(bench, _match_calls(bench, large), _match_calls(bench, small))
        apply_ms, apply_ratios = await _interleaved(bench, _steady_calls(bench, large), _steady_calls(bench, small))
        growing_ms.append((await call_costs(bench.server, large.apply_calls(bench, GROWING_CALLS))).mean_ms)
        rows.append(
            {
                "blocks": reached,
                "match 128: server ms": spread(match_ms),
                "x small": spread(match_ratios),
                "apply 256: server ms": spread(apply_ms),
                "x small ": spread(apply_ratios),
                "growing on: ms": growing_ms[-1],
                "on the way: p99": percentile(on_the_way.longest_s, 0.99) * 1e3,
                "max": max(on_the_way.longest_s) * 1e3,
                "used memory MB": used_bytes / 1e6,
                "largest key, fields": fields,
            }
        )
    bench.server.flush()
    title = (
        f"Growth: calls on an index of this size, ratio to one that stays at {first:,} blocks, "
        "and all calls that made it grow so far"
    )
    scale = f"{first:,} to {reached:,} blocks"
    floors = [
        Floor(what=f"match of 128, {scale}: ratio", value=spread(match_ratios)[1], most=MOST_RATIO),
        Floor(what=f"apply of 256, {scale}: ratio", value=spread(apply_ratios)[1], most=MOST_RATIO),
        Floor(what=f"growing apply, {scale}: ratio", value=growing_ms[-1] / growing_ms[0], most=MOST_RATIO),
        Floor(what="largest key while growing, fields", value=largest, most=MOST_FIELDS),
    ]
    return Table(title=title, rows=rows), floors


async def _grow(bench: Bench, grown: Grown, size: int) -> tuple[CallCosts, int]:
    """Lets it grow to a size; costs of the calls, and fields of the largest key where buckets were fullest."""
    costs = CallCosts()
    fields, walked_at = 0, 0
    while (missing := (size - grown.num_blocks) // MAX_APPLY_HASHES) > 0:
        few = max(grown.num_blocks // MAX_APPLY_HASHES // LOOKS_A_ROUND, 1)
        costs.extend(await call_costs(bench.server, grown.apply_calls(bench, min(missing, few))))
        bits, split = (int(value or 0) for value in bench.server.command("HMGET", grown.keys.meta, "k", "split"))
        if split >= FULLEST * 2**bits and bits != walked_at:
            fields, walked_at = max(fields, bench.server.largest_hash()), bits
    return costs, fields


async def _interleaved(
    bench: Bench,
    large: Sequence[Callable[[], Awaitable[object]]],
    small: Sequence[Callable[[], Awaitable[object]]],
) -> tuple[list[float], list[float]]:
    """Mean server ms of the calls on the large index in each repeat, and the ratio to those on the small one."""
    means_ms, ratios = [], []
    for _ in range(bench.sizes.repeats):
        mean_ms = (await call_costs(bench.server, large)).mean_ms
        means_ms.append(mean_ms)
        ratios.append(mean_ms / (await call_costs(bench.server, small)).mean_ms)
    return means_ms, ratios


def _match_calls(bench: Bench, grown: Grown) -> list[Callable[[], Awaitable[object]]]:
    return [partial(grown.index.match, bench.random.choice(grown.chains)) for _ in range(bench.sizes.match_calls)]


def _steady_calls(bench: Bench, grown: Grown) -> list[Callable[[], Awaitable[object]]]:
    """Stores and removes in turn, so that the index keeps its size."""
    calls: list[Callable[[], Awaitable[object]]] = []
    for _ in range(STEADY_CALLS):
        writer, batch = next(grown.next_writer), new_hashes(bench.random, MAX_APPLY_HASHES)
        calls += [partial(writer.apply, batch), partial(writer.apply, (), batch)]
    return calls
