"""What the simulator says of the paper's experiments, beside what the paper (arXiv 2512.20968) publishes.

    python docs/paper.py

256 GPUs, 32 heads x 128, 128k to 1M tokens, Ring against the tile that is predicted to be fastest.  The machine is the
built-in "h100", links from datasheets and blocks as measured on an H200.  The paper's GPUs, network, dtype and mask are
not known here, so what would change the comparison is varied: links and blocks twice as fast and half as fast, full and
causal attention.
"""

from dataclasses import replace

from mpiattn.console.table import percent, table
from mpiattn.model import search
from mpiattn.model.machine import H100
from mpiattn.model.space import SearchSpace
from mpiattn.problem.layout import Layout
from mpiattn.problem.problem import Problem
from mpiattn.schedule.tile import Tile, tiles
from mpiattn.schedule.travels import volume

LENGTHS = [2**17, 2**18, 2**19, 2**20]
VARIED = {
    "h100": (1, 1),
    "links x 2": (2, 1),
    "links / 2": (0.5, 1),
    "blocks x 2": (1, 2),
    "blocks / 2": (1, 0.5),
    "links / 4, blocks x 2": (0.25, 2),
}


def machine(links, blocks):
    """The h100 with links and blocks so many times as fast."""
    return replace(
        H100,
        flops={dtype: rate * blocks for dtype, rate in H100.flops.items()},
        inside=H100.inside._replace(bandwidth=H100.inside.bandwidth * links),
        between=H100.between._replace(bandwidth=H100.between.bandwidth * links),
    )


def compared(tokens, ranks, causal, on, direction="both"):
    """(Ring, the fastest tile) as Choices of the greedy schedule."""
    problem = Problem(seqlen=tokens, heads=32, head_dim=128, dtype="bfloat16", causal=causal)
    layout = Layout("striped" if causal else "contiguous", tokens, ranks)
    pair = layout, layout
    space = SearchSpace(
        problem, ranks, on, schedules=("greedy",), tiles=tiles(ranks), layout_pairs=[pair], mesh_layout=pair
    )
    choices, _ = search.survey(replace(space, direction=direction))
    best = min(choices, key=lambda choice: choice.seconds)
    return next(choice for choice in choices if choice.tile == Tile(1, 1, ranks)), best


def speedups(causal, on, direction):
    """Speed-up over Ring by length, the tiles, and what they save of Ring's traffic, in elements as in the paper."""
    pairs = [compared(tokens, 256, causal, on, direction) for tokens in LENGTHS]
    ring_volume = volume(Tile(1, 1, 256), direction=direction)
    return (
        [ring.seconds / best.seconds for ring, best in pairs],
        [str(best.tile) for _, best in pairs],
        [1 - volume(best.tile, direction=direction) / ring_volume for _, best in pairs],
    )


def rows():
    """The table, cell by cell."""
    yield "the paper", "", "2.9 mean, 3.4 best", "", "79.0 % mean, 85.4 % best", "91.5 %"
    for name, factors in VARIED.items():
        on = machine(*factors)
        for causal in (False, True):
            gains, chosen, saved = speedups(causal, on, "both")
            ring, _ = compared(2**20, 128, causal, on)
            yield (
                name,
                "causal" if causal else "full",
                " ".join(f"{gain:.2f}" for gain in gains),
                " ".join(chosen),
                f"{percent(sum(saved) / 4)} mean, {percent(max(saved))} best",
                percent(ring.waiting),
            )


def main():
    """Print the table."""
    print("256 GPUs, 32 heads x 128, bfloat16, forward + backward, greedy schedules")
    print(f"machine h100: {H100}\n")
    print(
        table(
            rows(),
            ("machine", "mask", "speed-up at 128k 256k 512k 1M", "tiles", "less traffic", "Ring waits, 128 GPUs, 1M"),
        )
    )


if __name__ == "__main__":
    main()
