"""Routing in front of plain engines, beside other routers: `make bench-routing`."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from prefixcache.demo.model import ensure_demo_model
from prefixcache.rendering.byte_tokenizer import byte_tokenizer_files
from tests.bench.report import report
from tests.bench.routing.bench import floors, measure, tables
from tests.bench.routing.sizes import FULL, QUICK
from tests.bench.routing.targets import OURS, PEERS, Target, installed_peers
from tests.bench.routing.tokenizing import measure_tokenizing
from tests.support.tiny_tokenizer import write_files


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--quick", action="store_true", help="a smoke: our proxy, small sizes, floors shown, not judged"
    )
    options.add_argument("--only", metavar="NAME", action="append", help="targets whose name contains this; repeatable")
    options.add_argument("--seeds", type=int, metavar="N", help="the first N seeds")
    chosen = options.parse_args()
    sizes = QUICK if chosen.quick else FULL
    targets = _targets(chosen.only, with_peers=not chosen.quick)
    seeds = sizes.seeds[: chosen.seeds]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer = write_files(byte_tokenizer_files(), folder) if chosen.quick else ensure_demo_model("bfloat16")
        tokenizing, its_floors = measure_tokenizing(tokenizer, sizes.tokenized_turns)
        tokenizing.show()
        routed = asyncio.run(measure(targets, sizes, seeds, tokenizer, folder))
    shown = tables(routed, sizes)
    for table in shown:
        table.show()
    name = "routing-quick" if chosen.quick else "routing"
    about = {"seeds": seeds, "took_s": round(time.monotonic() - began_s)}
    report(name, [tokenizing, *shown], [*its_floors, *floors(routed, sizes)], about=about, judged=not chosen.quick)


def _targets(only: list[str] | None, *, with_peers: bool) -> list[Target]:
    peers, left_out = installed_peers() if with_peers else ([], [f"left out: {peer.name}: --quick" for peer in PEERS])
    for line in left_out:
        print(line)
    return [target for target in (*OURS, *peers) if only is None or any(part in target.name for part in only)]


if __name__ == "__main__":
    main()
