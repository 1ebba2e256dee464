"""The assignment matrix: which rank computes which block, and what one rank receives and sends for its tile.

Rank r*a + c computes the blocks of the query chunks r*a ... r*a + a-1 and the KV chunks c, c + a, c + 2a, ...
(Mesh-Attention, arXiv 2512.20968): a blocks high, every a-th column.  A tile of a x b blocks needs a-1 + b-1 chunks of
other ranks; a Ring's row of n blocks needs n-1.
"""

import numpy as np

from ..errors import ArgumentError
from ..schedule.kinds import GATHERED, IN_COLUMNS, KINDS, REDUCED
from ..system.words import number, size
from .style import COLORS, GRAY, INK, PALE, POINTS, box, centred, new_figure, styled

MOST_NUMBERED = 16  # with up to this many ranks every block has its rank's number and color
MOST_CELLS = 256  # per side of the image of the work; more blocks are averaged
LIGHT = 0.75  # share of a rank's color; the rest is white
LONG = 100  # from this many ranks on, chunk numbers leave no room for the kind
MOST_LINES = 32  # lines between the rows of a mesh
WIDE = 1.15  # least width of the drawing of a tile over its height
MOST_CHUNKS = 9  # chunks per side of a tile that are drawn; larger tiles are abbreviated


def check_rank(rank, tile):
    """Raise ArgumentError unless the mesh of a tile has that rank."""
    if not 0 <= rank < tile.ranks:
        raise ArgumentError(f"rank is {rank}; of {tile.ranks} ranks it may be 0 to {tile.ranks - 1}")


def _color_of(rank, tile):
    """The color of a rank: far from those of its neighbours in the row, and darker for higher columns."""
    from matplotlib import colormaps

    row, column = tile.place(rank)
    return 1 - LIGHT * (1 - np.array(colormaps["cividis_r"]((column * tile.b + row) / max(1, tile.ranks - 1))[:3]))


def draw_assignment(axes, tile, rank=0, work=None, planes=1):
    """Draw the n x n blocks of a mesh, or of one of several planes, the tile of `rank` with a frame around it.

    work: attended pairs of every block, (n, n), from `model.pairs.Pairs`: blocks with less work are paler,
    empty ones white.  Up to MOST_NUMBERED ranks every block has its rank's number and color; with more ranks only the
    blocks of `rank` are colored.
    """
    check_rank(rank, tile)
    n, queries, keys = tile.ranks, tile.row(rank), tile.column(rank)
    share = None if work is None else np.asarray(work) / max(1, np.max(work))
    if n <= MOST_NUMBERED:
        _draw_numbered(axes, tile, rank, np.ones((n, n)) if share is None else share)
    else:
        if share is not None:
            step = -(-n // MOST_CELLS)
            whole = np.add.reduceat(np.add.reduceat(share, range(0, n, step), 0), range(0, n, step), 1)
            counts = np.diff([*range(0, n, step), n])
            look = {"cmap": "Greys", "vmin": 0, "vmax": 2.5, "interpolation": "nearest"}
            axes.imshow(whole / np.outer(counts, counts), extent=(0, n, n, 0), **look)
        for row in range(0, n, tile.a) if tile.b <= MOST_LINES else ():
            box(axes, (0, row), n, tile.a, fill=False, edgecolor=GRAY, linewidth=0.3)
        needs = Needs(tile, rank, work)
        for u in np.flatnonzero(needs.rows):
            box(axes, (0, queries[u]), n, 1, facecolor=COLORS["Q"], alpha=0.35, linewidth=0, label="Q")
        for w in np.flatnonzero(needs.columns):
            box(axes, (keys[w], 0), 1, n, facecolor=COLORS["KV"], alpha=0.6, linewidth=0, label="KV")
    frame = {"fill": False, "linewidth": 1.8} if n <= MOST_NUMBERED else {"fill": True, "linewidth": 0.4}
    for chunk in keys:  # the frames around the tile
        corner = chunk, min(queries)
        box(axes, corner, 1, tile.a, facecolor=INK, edgecolor=INK, zorder=3, label="tile", **frame)
    _chunk_axes(axes, n)
    axes.set_title(
        f"Blocks of {number(n, 'rank')}, tile {tile}"
        + (f", in one of {planes} planes\n" if planes > 1 else "\n")
        + (
            f"number: the rank that computes it; framed: rank {rank}"
            if n <= MOST_NUMBERED
            else f"black: rank {rank}; blue and orange: chunks it needs"
        )
        + ("" if share is None else "\npaler: the mask leaves less work")
    )


def _draw_numbered(axes, tile, rank, share):
    n = tile.ranks
    for cut in range(1, n):
        axes.axhline(cut, color="white", linewidth=1.5 if cut % tile.a == 0 else 0.4)
        axes.axvline(cut, color="white", linewidth=0.4)
    for i in range(n):
        for j in range(n):
            owner = i // tile.a * tile.a + j % tile.a
            color = 1 - share[i, j] * (1 - _color_of(owner, tile))
            box(axes, (j, i), 1, 1, facecolor=color, label="block")
            luminance = color @ (0.299, 0.587, 0.114)
            look = {"color": INK if luminance > 0.42 else "white", "weight": "bold" if owner == rank else "normal"}
            centred(axes, j + 0.5, i + 0.52, str(owner), fontsize=min(9, 100 / n), **look)


def _chunk_axes(axes, n):
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal", anchor="N")
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("KV chunk")
    axes.set_ylabel("Q chunk")
    step = 1 if n <= MOST_NUMBERED else n // 8
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([chunk + 0.5 for chunk in range(0, n, step)]))
        axis.set_major_formatter(FuncFormatter(lambda middle, _: f"{middle - 0.5:.0f}"))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(True)


def shown(count):
    """The hops to show of `count`; None stands for those left out."""
    return list(range(count)) if count <= MOST_CHUNKS else [*range(MOST_CHUNKS - 2), None, count - 1]


class Needs:
    """What a rank's tile needs under a mask: whether each query chunk, KV chunk and block has work, by hop.

    moved: {kind: whether its chunks move}, by hop, if that is not what the tile needs.
    """

    def __init__(self, tile, rank, work, moved=None):
        self.queries, self.keys = tile.row(rank), tile.column(rank)
        work = np.ones((tile.ranks, tile.ranks), bool) if work is None else np.asarray(work) > 0
        self.blocks = work[np.ix_(self.queries, self.keys)]
        self.rows, self.columns = self.blocks.any(axis=1), self.blocks.any(axis=0)
        self._moved = moved

    def of(self, kind):
        """The chunks of a kind by hop, whether each moves, and how many do."""
        chunks, moves = (self.keys, self.columns) if kind in IN_COLUMNS else (self.queries, self.rows)
        if self._moved is not None:
            moves = self._moved[kind]
        return chunks, moves, int(moves[1:].sum())


def draw_tile(axes, tile, rank=0, work=None, direction="forward", nbytes=None, moved=None, in_part=False):
    """Draw the tile of one rank: its blocks, the chunks that it receives and the partials that it sends.

    work: as for `draw_assignment`; chunks that the mask makes needless are left empty.  direction: "forward" or
    "backward".  nbytes: bytes that the rank receives or sends, by kind, for the labels.  moved: as of `Needs`.
    in_part: whether some chunks move only in part.
    """
    check_rank(rank, tile)
    needs = Needs(tile, rank, work, moved)
    rows, columns = shown(tile.a), shown(tile.b)
    down = len(rows) + (5.2 if direction == "backward" else 2.8)
    width, height = axes.figure.get_size_inches() * axes.get_position().size  # changed later by the layout
    unit = POINTS * min(1.25 * width / (len(columns) + 7.6), 0.83 * height / down)  # side of a block in points, about

    def cell(x, y, text, label, **look):
        box(axes, (x, y), 0.92, 0.92, label=label, **look)
        centred(axes, x + 0.46, y + 0.48, text, fontsize=min(7, 1.4 * unit / max(1, len(text))))

    def chunk(x, y, kind, hop):
        """A chunk beside the tile: filled if it is sent, framed if it is the rank's own, dotted if neither.

        Those that are left out are filled if one of them is sent.
        """
        chunks, moves, _ = needs.of(kind)
        if hop is None:
            state = "left out" if moves[MOST_CHUNKS - 2 : -1].any() else "left out, not needed"
        else:
            state = "own" if hop == 0 else "moved" if moves[hop] else "not needed"
        text = "..." if hop is None else f"{kind if tile.ranks < LONG else ''}{chunks[hop]}"
        color, fill = COLORS[kind], COLORS[kind] if state in ("moved", "left out") else "white"
        look = {"edgecolor": color, "facecolor": fill, "linestyle": ":" if "not needed" in state else "-"}
        cell(x, y, text, f"{kind} {state}", linewidth=1.2, **look)

    def label(kind, between):
        to_or_from = "in" if kind in GATHERED else "out"
        return f"{to_or_from}:{between}{needs.of(kind)[2]} {kind}" + (
            f"{between}({size(nbytes[kind])})" if nbytes else ""
        )

    for y, u in enumerate(rows):
        for x, w in enumerate(columns):
            if u is not None and w is not None:
                text = "" if tile.ranks > MOST_NUMBERED else f"{needs.queries[u]},{needs.keys[w]}"
                what, fill = ("block", PALE) if needs.blocks[u, w] else ("empty block", "white")
                cell(x, y, text, what, edgecolor=PALE, facecolor=fill)
    below = len(rows)
    for kind in (*GATHERED, *REDUCED[direction]):
        gathered = kind in GATHERED
        if kind in IN_COLUMNS:
            for x, w in enumerate(columns):
                chunk(x, -1.5 if gathered else below + 0.5, kind, w)
            y, side = (-1.7, "bottom") if gathered else (below + 1.7, "top")
            axes.text(len(columns) / 2, y, label(kind, " "), ha="center", va=side)
        else:
            for y, u in enumerate(rows):
                chunk(-1.5 if gathered else len(columns) + 0.5, y, kind, u)
            x, side = (-1.7, "right") if gathered else (len(columns) + 1.7, "left")
            axes.text(x, below / 2, label(kind, "\n"), ha=side, va="center")
    beside = max(3.8, (WIDE * down - len(columns)) / 2)  # a narrow picture's title needs the width
    axes.set(xlim=(-beside, len(columns) + beside), ylim=(down - 2.6, -2.6), aspect="equal", anchor="N")
    axes.set_axis_off()
    axes.set_title(_tile_title(tile, rank, direction, needs, in_part))


def _tile_title(tile, rank, direction, needs, in_part):
    head = f"Rank {rank}, {direction}: A x B = {tile.a} x {tile.b} blocks; white: own chunks"
    by_count = {}
    for kind, entry in KINDS[direction].items():
        by_count.setdefault(needs.of(kind)[2], []).extend(array.name for array in entry.arrays if array.dim)
    moves = {count: names for count, names in by_count.items() if count}
    if not moves:
        return f"{head}\nnothing moves"
    counts = " + ".join(f"{count} of each {', '.join(names)}" for count, names in moves.items())
    chunks = number(sum(count * len(names) for count, names in moves.items()), "chunk")
    return f"{head}\n{counts}:\n{chunks} moved (filled)" + (", some only in part" if in_part else "")


@styled
def assignment(tile, rank=0, work=None, direction="forward", nbytes=None):
    """A figure of `draw_assignment` and, beside it, `draw_tile`."""
    figure = new_figure(8.4, 4.3)
    left, right = figure.subplots(1, 2)
    draw_assignment(left, tile, rank, work)
    draw_tile(right, tile, rank, work, direction, nbytes)
    return figure
