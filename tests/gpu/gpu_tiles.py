"""Times other tile sizes beside those of the tile table, which was made without a GPU.

  python gpu_tiles.py RESULT.json [--backend NAME] [--tokens TOKENS]

Each candidate takes the place of one entry of the table.  It is compared with float64, then timed in turn with the
entry.  One that is wrong, or that does not compile, is reported and keeps no other from being tried.  RESULT.json is
{entry: {tile: {"seconds": median, "of_table": ratio of its time to the table's} or {"error": text}}}; a tile is its
rows, columns, warps, stages, parts and column warps.
"""

import argparse
import contextlib
import json
import sys
from functools import partial
from pathlib import Path

from mpiattn import backends
from mpiattn.backends.cuda import launches, tile_table
from mpiattn.backends.cuda.tile_table import ScoreTile as Tile
from mpiattn.bench import kernel
from mpiattn.bench.clock import clock_of
from mpiattn.bench.turns import in_turn
from mpiattn.problem.problem import Problem

SHAPE = {"heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
RUNS, LEAST = 5, 0.02  # measurements of each, seconds of a measurement
CANDIDATES = {  # by work and head dim
    ("forward", 128): [Tile(128, 64, 4, 1), Tile(128, 32, 4, 2), Tile(128, 48, 4, 1)],
    ("forward", 64): [Tile(128, 96, 4, 1), Tile(128, 64, 4, 2), Tile(128, 80, 4, 1), Tile(256, 64, 8, 1)],
    ("forward", 256): [Tile(128, 64, 8, 1), Tile(64, 64, 4, 1), Tile(64, 32, 4, 2), Tile(128, 96, 8, 1)],
    ("gradient_q", 64): [Tile(128, 64, 4, 1), Tile(128, 32, 4, 2)],
    ("gradient_q", 256): [Tile(64, 32, 4, 1, 2), Tile(64, 32, 4, 1), Tile(64, 64, 4, 1), Tile(128, 32, 8, 1)],
    ("gradient_kv", 64): [Tile(128, 32, 4, 2), Tile(64, 64, 4, 1, column_warps=2), Tile(128, 32, 4, 1)],
    ("gradient_kv", 128): [Tile(128, 64, 8, 2, column_warps=2), Tile(64, 64, 4, 1, column_warps=2)],
    ("gradient_kv", 256): [
        Tile(64, 64, 8, 1, column_warps=2),
        Tile(32, 32, 4, 1, column_warps=2),
        Tile(64, 32, 8, 1, column_warps=2),
    ],
}


@contextlib.contextmanager
def in_place_of_the_entry(work, tile):
    """Launch `work` with this tile; others, and those of decoding, with the table's."""
    of_table = launches.attention_kernel

    def attention_kernel(name, *arguments, **options):
        return of_table(name, *arguments, **options, **({"cut": tile} if name == work else {}))

    def forget():
        launches.forward_launch.cache_clear()
        launches.backward_launches.cache_clear()

    launches.attention_kernel = attention_kernel
    forget()
    try:
        yield
    finally:
        launches.attention_kernel = of_table
        forget()


def times(backend, clock, work, dim, tokens):
    """{tile: what is known of it}, the table's first."""
    backward = work != "forward"
    problem = Problem(seqlen=tokens, head_dim=dim, **SHAPE)
    entry = tile_table.tile(work, 2, dim, dim, backend.architecture)
    block = kernel.Block(backend, problem)
    if backward:
        block.prepare_backward()
    subjects, known = {}, {}

    def seconds(tile, repeats=1):
        with in_place_of_the_entry(work, tile):
            return clock.seconds(block.attend_backward if backward else block.attend, times=repeats)

    for tile in dict.fromkeys([entry, *CANDIDATES[work, dim]]):
        name = "x".join(map(str, tile))
        try:
            with in_place_of_the_entry(work, tile):
                kernel.check_small(backend, problem, backward)
            repeats = max(1, min(50, round(LEAST / seconds(tile))))
            subjects[name] = partial(seconds, tile, repeats)
        except Exception as error:  # of whatever kind: the others are worth knowing
            known[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    measured = {name: sorted(runs)[RUNS // 2] for name, runs in in_turn(subjects, RUNS).items()}
    first = next(iter(measured.values()), None)
    return {name: {"seconds": median, "of_table": median / first} for name, median in measured.items()} | known


def main():
    """Try all candidates; the exit code is 1 if one is wrong or does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    backend = backends.get(args.backend)
    clock, known = clock_of(backend), {}
    for work, dim in CANDIDATES:
        known[f"{work} {dim}"] = tiles = times(backend, clock, work, dim, args.tokens)
        for name, of in tiles.items():
            said = of.get("error") or f"{of['seconds'] * 1e3:.3f} ms, {of['of_table']:.2f} of the table's"
            print(f"{work}, head dim {dim}, {name}: {said}", flush=True)
        args.result.write_text(json.dumps(known, indent=1))
    return int(any("error" in of for tiles in known.values() for of in tiles.values()))


if __name__ == "__main__":
    sys.exit(main())
