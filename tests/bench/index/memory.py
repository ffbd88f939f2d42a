"""Memory of an index block, for four tree shapes, at one holder and at four."""

from __future__ import annotations

from random import Random

from tests.bench.index.bench import Bench, Writer
from tests.bench.index.flat_layout import FlatLayout
from tests.bench.index.tree_shapes import TREE_SHAPES, distinct_blocks
from tests.bench.report import Floor, Table

MOST_BYTES = {1: (24.0, 20.0), 4: (48.0, 36.0)}
"""Holders -> bytes a block: the floor and what is very good."""
MOST_FIELDS = 128


async def measure_memory(bench: Bench, flat: FlatLayout) -> tuple[Table, list[Floor]]:
    rows: list[dict[str, object]] = []
    floors: list[Floor] = []
    largest = 0
    for name, shape in TREE_SHAPES.items():
        chains = list(shape(Random(bench.random.getrandbits(64)), bench.sizes.shape_scale))
        blocks = distinct_blocks(iter(chains))
        bytes_per_block = {holders: [0.0, 0.0] for holders in MOST_BYTES}

        bench.server.flush()
        index = bench.new_index()
        writers = [await Writer.register(index) for _ in range(max(MOST_BYTES))]
        empty_bytes = bench.server.used_memory_bytes()
        for holders, writer in enumerate(writers, start=1):
            await writer.store(blocks)
            if holders in MOST_BYTES:
                used_bytes = bench.server.used_memory_bytes() - empty_bytes
                bytes_per_block[holders][0] = used_bytes / len(blocks)
        fields = bench.server.largest_hash()
        largest = max(largest, fields)
        match = await index.match(chains[-1])
        assert match.depths == {writer.incarnation: len(chains[-1]) for writer in writers}, match

        bench.server.flush()
        empty_bytes = bench.server.used_memory_bytes()
        for holders in range(1, max(MOST_BYTES) + 1):
            await flat.load(writers[holders - 1].incarnation, blocks)
            if holders in MOST_BYTES:
                used_bytes = bench.server.used_memory_bytes() - empty_bytes
                bytes_per_block[holders][1] = used_bytes / len(blocks)
        assert await flat.match(chains[-1]) == match.depths

        for holders, (own, flat_bytes) in bytes_per_block.items():
            most, very_good = MOST_BYTES[holders]
            floors.append(
                Floor(what=f"bytes a block, {name}, holders {holders}", value=own, most=most, very_good=very_good)
            )
            rows.append(
                {
                    "shape": name,
                    "blocks": len(blocks),
                    "holders": holders,
                    "bytes a block": own,
                    "one HASH per block": flat_bytes,
                    "ratio": flat_bytes / own,
                    "largest key, fields": fields,
                }
            )
    bench.server.flush()
    floors.append(Floor(what="largest key of any shape, fields", value=largest, most=MOST_FIELDS))
    return Table(title="Memory: used_memory less that of the empty server, by index block", rows=rows), floors
