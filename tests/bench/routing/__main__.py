"""Routing in front of plain engines, beside other routers, and of simulated fleets: `make bench-routing`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from prefixcache.demo.model import ensure_demo_model
from prefixcache.rendering.byte_tokenizer import byte_tokenizer_files
from tests.bench.report import report
from tests.bench.routing.bench import floors, measure, tables
from tests.bench.routing.deciding import measure_deciding
from tests.bench.routing.live import SPEED, measure_given
from tests.bench.routing.real_engines import measure_real, real_floors, real_table
from tests.bench.routing.sizes import FULL, QUICK, QUICK_ENGINES, REAL_ENGINES, Sizes
from tests.bench.routing.targets import FOR_REAL_ENGINES, OURS, PEERS, Target, installed
from tests.bench.routing.tokenizing import measure_tokenizing
from tests.bench.routing.traces import measure_traces
from tests.support.tiny_tokenizer import write_files


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--quick", action="store_true", help="a smoke: our proxy, small sizes, floors shown, not judged"
    )
    options.add_argument("--only", metavar="NAME", action="append", help="targets whose name contains this; repeatable")
    options.add_argument("--seeds", type=int, metavar="N", help="the first N seeds")
    options.add_argument(
        "--engine",
        metavar="URL",
        action="append",
        default=os.environ.get("BENCH_ENGINES", "").split(),
        help="a real engine that runs: these are measured alone, without the others; repeatable [env: BENCH_ENGINES]",
    )
    options.add_argument(
        "--quick-engines",
        action="store_true",
        help="routers in front of engines that take 20 us a token, side by side, and nothing else",
    )
    options.add_argument("--speed", type=float, default=SPEED, help="of the live run: times as fast as its trace")
    chosen = options.parse_args()
    if chosen.quick_engines and chosen.engine:
        options.error("--quick-engines brings engines of its own; --engine and BENCH_ENGINES name others")
    if chosen.engine and not chosen.quick:
        _bench_real_engines(chosen.engine, chosen.only, FULL.seeds[: chosen.seeds])
        return
    sizes = QUICK if chosen.quick else FULL
    targets = _targets(OURS if chosen.quick else (*OURS, *PEERS), chosen.only)
    for peer in PEERS if chosen.quick else ():
        print(f"left out: {peer.name}: --quick")
    seeds = sizes.seeds[: chosen.seeds]
    if chosen.quick_engines:
        _bench_quick_engines(targets, sizes, seeds, quick=chosen.quick)
        return
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer = _tokenizer(folder, quick=chosen.quick)
        tokenizing, its_floors = measure_tokenizing(tokenizer, sizes.tokenized_turns)
        tokenizing.show()
        deciding, deciding_floors = measure_deciding(sizes.decision_repeats)
        deciding.show()
        routed = asyncio.run(measure(targets, sizes, seeds, tokenizer, folder))
    simulated, simulated_floors = measure_traces(quick=chosen.quick)
    live, live_floors = measure_given(quick=chosen.quick, speed=chosen.speed)
    shown = [*tables(routed, sizes), *simulated, *live]
    for table in shown:
        table.show()
    name = "routing-quick" if chosen.quick else "routing"
    about = {"seeds": seeds, "took_s": round(time.monotonic() - began_s)}
    judged = [*its_floors, *deciding_floors, *floors(routed, sizes), *simulated_floors, *live_floors]
    report(name, [tokenizing, deciding, *shown], judged, about=about, judged=not chosen.quick)


def _bench_real_engines(engines: list[str], only: list[str] | None, seeds: tuple[int, ...]) -> None:
    targets = _targets(FOR_REAL_ENGINES, only)
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure_real(engines, targets, REAL_ENGINES, seeds, Path(folder)))
    table = real_table(measured)
    table.show()
    report("routing-real-engines", [table], real_floors(measured), about={"seeds": seeds})


def _bench_quick_engines(targets: list[Target], sizes: Sizes, seeds: tuple[int, ...], *, quick: bool) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer = _tokenizer(folder, quick=quick)
        routed = asyncio.run(measure(targets, sizes, seeds, tokenizer, folder, engine_flags=QUICK_ENGINES))
    shown = tables(routed, sizes)
    for table in shown:
        table.show()
    name = "routing-quick" if quick else "routing-quick-engines"
    report(name, shown, floors(routed, sizes), about={"seeds": seeds}, judged=not quick)


def _tokenizer(folder: Path, *, quick: bool) -> Path:
    return write_files(byte_tokenizer_files(), folder) if quick else ensure_demo_model("bfloat16")


def _targets(among: tuple[Target, ...], only: list[str] | None) -> list[Target]:
    """Those that can run here and whose name contains a part of `only`; the others are told."""
    there, left_out = installed(among)
    for line in left_out:
        print(line)
    chosen = [target for target in there if only is None or any(part in target.name for part in only)]
    if not chosen:
        names = ", ".join(f"{target.name!r}" for target in there)
        sys.exit(f"nothing to measure: --only {only} is part of no name; there are {names}")
    return chosen


if __name__ == "__main__":
    main()
