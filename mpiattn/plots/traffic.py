"""Bytes that a rank sends against the number of ranks: Ring, the best meshes of one and more planes, Ulysses and USP.

Means over ranks without a mask, by the formulas of `mpiattn.schedule.travels` and `mpiattn.schedule.regroup`, which the
tests compare with counts.
"""

from ..console.table import percent
from ..errors import ArgumentError
from ..schedule import travels as formulas
from ..schedule.kinds import KINDS
from ..schedule.regroup import every_tile, mean_sent
from ..schedule.tile import Tile, tiles
from .style import GRAY, INK, against_ranks, label_ends, new_figure, passes_in_words, rank_axis, size_axis, styled

FEWEST = 2


def counts(most):
    """The numbers of ranks to show: powers of two up to `most`, and `most`."""
    return sorted({2**i for i in range(1, most.bit_length()) if 2**i <= most} | {most})


def best_tile(problem, ranks, direction="forward"):
    """The tile that sends the fewest bytes: (Tile, bytes)."""
    return min(((tile, mesh(problem, tile, direction)) for tile in tiles(ranks)), key=lambda pair: pair[1])


def best_of_planes(problem, ranks, direction="forward"):
    """As `best_tile`, of the tiles of several planes; None if there are none."""
    several = [tile for tile in every_tile(ranks, problem.heads, problem.kv_heads, problem.batch) if tile.h > 1]
    return min(((tile, mesh(problem, tile, direction)) for tile in several), key=lambda pair: pair[1], default=None)


def mesh(problem, tile, direction="forward"):
    """Mean bytes that a rank sends with a tile in a direction; "both": the sum of both directions."""
    directions = KINDS if direction == "both" else (direction,)
    return sum(mean_sent(problem, tile, name) for name in directions)


def lines(problem, most, direction="forward"):
    """Pairs (ranks, bytes) to draw, by method; without the ranks for which a method is not possible."""
    by_method = {"Ring": [], "best mesh": [], "planes": [], "USP": [], "Ulysses": []}
    for ranks in counts(most):
        by_method["Ring"].append((ranks, mesh(problem, Tile(1, 1, ranks), direction)))
        by_method["best mesh"].append((ranks, best_tile(problem, ranks, direction)[1]))
        of_planes = best_of_planes(problem, ranks, direction)
        if of_planes:
            by_method["planes"].append((ranks, of_planes[1]))
        group, nbytes = formulas.best_usp(problem, ranks, direction)
        if group > 1:
            by_method["USP"].append((ranks, nbytes))
        nbytes = formulas.ulysses(problem, ranks, direction)
        if nbytes is not None:
            by_method["Ulysses"].append((ranks, nbytes))
    return {name: points for name, points in by_method.items() if points}


UNDER_OTHERS = {"markerfacecolor": "white", "markersize": 7, "zorder": 1}
LOOK = {
    "Ring": {"color": INK, "marker": "o", "linestyle": "-"},
    "best mesh": {"color": "#0072b2", "marker": "s", "linestyle": "-", "linewidth": 2.2},
    "planes": {"color": "#009e73", "marker": "v", "linestyle": "-"},
    "USP": {"color": "#d55e00", "marker": "^", "linestyle": "--"},
    "Ulysses": {"color": GRAY, "marker": "D", "linestyle": ":", **UNDER_OTHERS},
}


def draw_traffic(axes, problem, most, direction="forward"):
    """Draw bytes per rank against the number of ranks, up to `most`."""
    if most < FEWEST:
        raise ArgumentError(f"ranks is {most}; it must be at least {FEWEST} where traffic is to be drawn")
    by_method, labels = lines(problem, most, direction), []
    if not by_method["Ring"][-1][1]:
        raise ArgumentError("the problem has no tokens; nothing is sent that could be drawn")
    for name, points in by_method.items():
        axes.plot(*zip(*points), **{"markersize": 3.5, **LOOK[name]}, label=name)
    against_ranks(axes)
    shown = counts(most)
    rank_axis(axes.xaxis, shown if len(shown) < 10 else shown[::2])
    size_axis(axes.yaxis)
    best, _ = best_tile(problem, most, direction)
    ring, color = by_method["Ring"][-1][1], LOOK["best mesh"]["color"]
    sizes = [nbytes for points in by_method.values() for _, nbytes in points if nbytes]
    axes.set(xlim=(shown[0] * 0.85, most * 1.15), ylim=(min(sizes, default=1) / 2.5, max(sizes, default=1) * 1.5))
    for ranks in shown[:-1]:
        marked, sent = best_tile(problem, ranks, direction)
        if marked.a > 1:
            beside = {"xytext": (2, 4), "textcoords": "offset points"}
            axes.annotate(str(marked), (ranks, sent), fontsize=6.5, color=color, **beside)

    def less(sent):
        return f":\n{percent(1 - sent / ring)} less" if sent <= ring else ":\nmore than Ring"

    group = formulas.best_usp(problem, most, direction)[0]
    of_planes = best_of_planes(problem, most, direction)
    names = {
        "best mesh": f"best mesh, {best}" if best.a > 1 else "best mesh: Ring",
        "planes": f"best with planes, {of_planes[0]}" if of_planes else "",
        "USP": f"USP, {group}x{most // group}",
    }
    for name in [name for name in by_method if name != "Ulysses"]:
        ranks, sent = by_method[name][-1]
        label = name  # also where its line ends at the last possible number
        if name != "Ring" and ranks == most:
            label = names[name] + ("" if names[name].endswith("Ring") else less(sent))
        labels.append((ranks, sent, label, LOOK[name]["color"]))
    label_ends(axes, labels)
    if "Ulysses" in by_method:
        text = f"diamonds: Ulysses, on no more ranks than the {problem.kv_heads} KV heads"
        axes.text(0.02, 0.03, text, color=GRAY, transform=axes.transAxes)
    axes.set_xlabel("ranks, the same sequence on all of them")
    axes.set_title(f"Bytes a rank sends, {passes_in_words(direction)}; exact, no mask")


@styled
def traffic(problem, most, direction="forward"):
    """A figure of `draw_traffic`."""
    figure = new_figure(5.6, 3.6)
    draw_traffic(figure.subplots(), problem, most, direction)
    return figure
