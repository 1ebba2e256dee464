"""Draws the pictures of this folder again: `python docs/figures/draw.py [FOLDER]`, with the extra `plot`."""

import json
import sys
from pathlib import Path

from mpiattn.files import trace_file
from mpiattn.model import cost, machine
from mpiattn.model.pairs import Pairs
from mpiattn.model.simulate import simulate
from mpiattn.model.workload import Load, Work
from mpiattn.plots.assignment import assignment
from mpiattn.plots.scaling import Series, scaling
from mpiattn.plots.style import save
from mpiattn.plots.timeline import timeline
from mpiattn.plots.traffic import traffic
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule.tile import Tile

LONG = Problem(524288, heads=32, head_dim=128, dtype="bfloat16", causal=True)
ON = machine.H100


def predicted(problem, tile, layout="zigzag"):
    """The timeline of a tile's forward pass on ON, greedy schedule."""
    cut = Layout(layout, problem.seqlen, tile.ranks)
    load = Load(Work(problem.whole_mask, cut, cut), tile)
    return simulate(cost.build("greedy", tile, "direct", problem, ON), problem, load, ON)


def strong_scaling():
    """Ring and mesh on ever more made-up hosts, as `python tests/scaling.py strong` has measured them."""
    rows = json.loads((Path(__file__).parent / "strong.json").read_text())
    hosts = [row["hosts"] for row in rows]
    series = [Series(name, hosts, [row[name] for row in rows]) for name in ("mesh", "ring")]
    series += [Series(name, hosts, [row["predicted"][name] for row in rows], True) for name in ("mesh", "ring")]
    return scaling(series, "2048 tokens x 512, float32, forward: hosts with 17 Mb/s each, emulated compute")


def traced():
    """A pass of 16 hosts as `mpiattn bench --trace` has seen it, on the network that tests/netcluster.py makes up."""
    passes = trace_file.read("FILE", Path(__file__).parent / "trace.json.gz")
    timelines = {rank: each.timeline for rank, each in passes["forward"].items()}
    title = "1024 tokens x 512, float32, tile 4x4, forward: 16 hosts with 16 Mb/s each, emulated compute"
    return timeline([("measured", timelines)], ranks=list(timelines), title=title)


def figures():
    """Every picture by its file's name."""
    layout = Layout("contiguous", 12 * 64, 12)
    work = Pairs(Problem(layout.seqlen, 1, 1, causal=True).whole_mask, layout, layout).table
    return {
        "assignment.svg": assignment(Tile(1, 3, 4), 7),
        "assignment-causal.svg": assignment(Tile(1, 3, 4), 7, work),
        "timeline.svg": timeline(
            [
                (f"{name} {tile}, predicted", predicted(LONG, tile))
                for name, tile in (("Ring", Tile(1, 1, 64)), ("mesh", Tile(1, 8, 8)))
            ],
            title=f"{LONG.seqlen} tokens x {LONG.heads} heads x {LONG.head_dim}, causal, {LONG.dtype}, 64 ranks of "
            "machine h100, forward",
        ),
        "scaling.svg": strong_scaling(),
        "trace.svg": traced(),
        "traffic.svg": traffic(Problem(1048576, heads=32, head_dim=128), 256),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, figure in figures().items():
        save(figure, str(folder / name), "FOLDER")
