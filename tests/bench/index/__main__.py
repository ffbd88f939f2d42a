"""The prefix index on a real server: `make bench-index`."""

from __future__ import annotations

import argparse
from dataclasses import replace

import uvloop

from tests.bench.index.apply_cost import measure_apply
from tests.bench.index.bench import open_bench
from tests.bench.index.claim_cost import measure_claim
from tests.bench.index.client_cost import measure_client
from tests.bench.index.flat_layout import FlatLayout
from tests.bench.index.growth import measure_growth
from tests.bench.index.lookups import measure_lookups
from tests.bench.index.match_cost import measure_match
from tests.bench.index.memory import measure_memory
from tests.bench.index.server import BenchServer, bench_server
from tests.bench.index.sizes import FULL, QUICK, Sizes
from tests.bench.index.sweep_cost import measure_sweep
from tests.bench.report import Floor, Table, report


async def measure(server: BenchServer, sizes: Sizes, seed: int) -> tuple[list[Table], list[Floor]]:
    """Each table is shown as soon as it is there."""
    tables: list[Table] = []
    floors: list[Floor] = []

    def note(table: Table, its_floors: list[Floor]) -> None:
        table.show()
        tables.append(table)
        floors.extend(its_floors)

    async with open_bench(server, sizes, seed) as bench:
        flat = FlatLayout(server.url)
        note(*await measure_memory(bench, flat))
        note(*await measure_match(bench, flat))
        note(*await measure_apply(bench, flat))
        note(*await measure_claim(bench))
        note(*await measure_client(bench))
        note(await measure_lookups(bench), [])
        note(*await measure_growth(bench))
        note(*await measure_sweep(bench))
        await flat.aclose()
    return tables, floors


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--server", choices=("any", "redis", "valkey"), default="any", help="any: redis-server on PATH, else Valkey"
    )
    options.add_argument("--quick", action="store_true", help="a smoke: small sizes, floors shown and not judged")
    options.add_argument("--blocks", type=float, help="index blocks that the index grows to, a power of ten")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    sizes = QUICK if chosen.quick else FULL
    if chosen.blocks is not None:
        growth = [sizes.growth[0]]
        while growth[-1] * 10 <= chosen.blocks:
            growth.append(growth[-1] * 10)
        sizes = replace(sizes, growth=tuple(growth))
    with bench_server(chosen.server) as server:
        about = {"server": server.version, "seed": chosen.seed}
        print(f"{server.version}, seed {chosen.seed}")
        tables, floors = uvloop.run(measure(server, sizes, chosen.seed))
    report("index-quick" if chosen.quick else "index", tables, floors, about=about, judged=not chosen.quick)


if __name__ == "__main__":
    main()
